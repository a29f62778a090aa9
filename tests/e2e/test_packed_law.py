"""The law of the int8 and int4 modes through the whole server: the same bits in any company.

No near tie is excused here: integer sums leave nothing to rounding, so greedy and seeded answers
out of a crowd on a small pool equal the same requests alone, token for token.
"""

import asyncio

import pytest
from e2e.oracle import Oracle
from e2e.test_crowd import FLAGS, POOL, sixty_four, stream_all
from support.server import running_server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_answers_from_a_crowd_equal_those_alone(mode: str, oracle: Oracle) -> None:
    asked = sixty_four(oracle)
    with running_server("--dtype", mode, *FLAGS) as small:
        together = asyncio.run(stream_all(small, asked))
        stats = small.wait_until_idle()
        computed = stats["prompt_tokens_total"] - stats["cached_tokens_total"]
        assert computed + stats["generated_tokens_total"] > 2 * POOL, "pages were used again"
    with running_server("--dtype", mode, "--disable-radix-cache") as roomy:
        for one, got in zip(asked, together, strict=True):
            assert got == roomy.generate(one.ids, **one.sampling)["output_ids"]
