"""int8 and int4 answers through the whole server do not depend on batch-mates, bit for bit.

No near tie is excused: integer sums round nothing, so greedy and seeded answers from a crowd on a
small pool equal those of the same requests alone.
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
