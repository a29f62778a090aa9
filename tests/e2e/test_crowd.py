"""Sixty-four concurrent streams over a pool too small for them get the answers they get alone."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest
from e2e.mode import BITWISE, DTYPE, NEAR_TIE
from e2e.oracle import Oracle
from e2e.prompts import TIMEOUTS
from support.server import PATIENCE_S, Server, running_server, wait_for

from tokenloom.client import AsyncClient

pytestmark = pytest.mark.slow

POOL = 400
# Low conservativeness: requests are admitted as soon as they fit, so some must be retracted.
FLAGS = (
    *("--kv-tokens", str(POOL), "--page-size", "8"),
    *("--schedule-conservativeness", "0.05", "--mixed-chunk-size", "0"),
)
LONG, LENGTHS = 40, (2, 3, 5, 8)
IDLE_CHECK_S = 1.3  # the scheduler audits its pages after a second without messages


@dataclass(frozen=True)
class Asked:
    ids: list[int]
    sampling: dict[str, object] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0.0


def sixty_four(oracle: Oracle) -> list[Asked]:
    """Requests with a common prefix, tails of 1 to 40 tokens, every fourth one sampled.

    Those with long answers come first, so that they fill the pool and outgrow it together.
    """
    opening = oracle.encode_text("The harbour master wrote down every ship that came in. " * 6)
    ending = oracle.encode_text("Among them were a schooner with red sails, " * 5)
    asked = []
    for i in range(64):
        sampled = {"temperature": 0.9, "seed": i, "top_p": 0.95}
        sampling: dict[str, object] = sampled if i % 4 == 3 else {"temperature": 0.0}
        length = LONG if i < 14 else LENGTHS[i // 4 % len(LENGTHS)]
        sampling |= {"max_new_tokens": length, "ignore_eos": True}
        asked.append(Asked([*opening, 500 + i, *ending[: i * 7 % 40]], sampling))
    return asked


async def stream_all(server: Server, asked: list[Asked]) -> list[list[int]]:
    """Return ids from streams, half of them over each door."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http,
        AsyncClient(server.door, timeout=TIMEOUTS) as socket,
    ):
        ways = [
            _by_http(http, one) if i % 2 else _by_socket(socket, one) for i, one in enumerate(asked)
        ]
        return await asyncio.gather(*ways)


async def _by_http(http: httpx.AsyncClient, asked: Asked) -> list[int]:
    body = {"input_ids": asked.ids, "sampling_params": asked.sampling, "stream": True}
    async with http.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    last: dict[str, list[int]] = json.loads(lines[-2].removeprefix("data: "))
    return last["output_ids"]


async def _by_socket(socket: AsyncClient, asked: Asked) -> list[int]:
    answer = socket.generate(input_ids=asked.ids, **asked.sampling)  # type: ignore[arg-type]
    async for _ in answer:
        pass
    return answer.token_ids


def test_each_answer_is_the_same_as_alone(server: Server, oracle: Oracle) -> None:
    asked = sixty_four(oracle)
    with running_server("--dtype", DTYPE, *FLAGS) as small:
        together = asyncio.run(stream_all(small, asked))
        stats = small.wait_until_idle()
        computed = stats["prompt_tokens_total"] - stats["cached_tokens_total"]
        assert computed + stats["generated_tokens_total"] > 2 * POOL, "pages were used again"
        assert stats["retractions_total"] > 0
        print(f"{stats['retractions_total']} retractions")
        assert stats["free_tokens"] + stats["evictable_tokens"] == POOL

        def audited() -> bool:  # which also resets the ratio
            return small.stats()["new_token_ratio"] != stats["new_token_ratio"]

        wait_for(audited, every=IDLE_CHECK_S)
        assert small.stats()["violations_total"] == 0
    for one, got in zip(asked, together, strict=True):
        alone = server.generate(one.ids, **one.sampling)["output_ids"]
        assert len(got) == one.sampling["max_new_tokens"]
        if got != alone:
            assert not BITWISE, "an answer changed in the crowd"
            assert one.greedy, "a seeded answer changed in the crowd"
            for answer in (got, alone):
                for difference in oracle.differences(one.ids, tuple(answer)):
                    assert difference.margin < NEAR_TIE, difference
                    print(f"near tie: {difference}")
