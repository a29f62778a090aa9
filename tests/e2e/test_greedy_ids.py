"""Greedy ids of twenty varied prompts equal those of transformers, however the work is batched.

Each configuration is asked twice: what the first round left in the prefix cache serves the second.
"""

import asyncio
from collections.abc import Iterator

import pytest
from e2e.oracle import END, NEAR_TIE, Oracle
from e2e.prompts import MAX_NEW, PROMPTS, Answer, ask
from support.server import Server, running_server

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[(16, 32), (16, 0), (1, 32), (1, 0)],
    ids=lambda param: f"page size {param[0]}, chunk {param[1] or 'none'}",
)
def fresh(request: pytest.FixtureRequest) -> Iterator[Server]:
    page_size, chunk = request.param
    flags = ["--page-size", str(page_size), "--chunked-prefill-size", str(chunk)]
    with running_server("--dtype", "float32", "--kv-tokens", "8192", *flags) as server:
        yield server


def assert_greedy(oracle: Oracle, answers: list[Answer]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = oracle.encode(prompt)
        assert answer.prompt_tokens == len(ids), prompt.name
        assert len(answer.ids) == MAX_NEW or answer.ids[-1] == END, prompt.name
        for difference in oracle.differences(ids, answer.ids):
            assert difference.margin < NEAR_TIE, (prompt.name, difference)
            print(f"{prompt.name}: near tie, {difference}")


def test_all_at_once_cold_then_one_by_one_warm(fresh: Server, oracle: Oracle) -> None:
    cold = asyncio.run(ask(fresh, PROMPTS))
    assert_greedy(oracle, cold)
    warm = [asyncio.run(ask(fresh, [prompt]))[0] for prompt in PROMPTS]
    assert_greedy(oracle, warm)
    page_size = fresh.info()["page_size"]
    for prompt, before, after in zip(PROMPTS, cold, warm, strict=True):
        reusable = (before.prompt_tokens - 1) // page_size * page_size
        assert after.cached_tokens == reusable, prompt.name
        assert after.ids == before.ids, prompt.name
    fresh.wait_until_idle()


def test_one_by_one_cold_then_all_at_once_warm(oracle: Oracle) -> None:
    with running_server("--dtype", "float32", "--kv-tokens", "8192") as server:
        cold = [asyncio.run(ask(server, [prompt]))[0] for prompt in PROMPTS]
        assert_greedy(oracle, cold)
        warm = asyncio.run(ask(server, PROMPTS))
        assert_greedy(oracle, warm)
        assert [answer.ids for answer in warm] == [answer.ids for answer in cold]
        assert sum(answer.cached_tokens for answer in warm) > 1500
