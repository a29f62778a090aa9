"""Greedy ids of twenty varied prompts equal those of transformers, however they are batched.

Each configuration is asked twice; the second round hits the prefix cache of the first.
"""

import asyncio
from collections.abc import Iterator

import pytest
from e2e.mode import DTYPE, NEAR_TIE
from e2e.oracle import END, Oracle
from e2e.prompts import MAX_NEW, PROMPTS, Answer, ask
from support.server import Server, running_server

pytestmark = pytest.mark.slow


CONFIGURATIONS = [(16, 32), (16, 0), (1, 32), (1, 0)]  # page size, chunk


@pytest.fixture(
    scope="module",
    params=CONFIGURATIONS,
    ids=lambda param: f"page size {param[0]}, chunk {param[1] or 'none'}",
)
def fresh(request: pytest.FixtureRequest) -> Iterator[Server]:
    page_size, chunk = request.param
    flags = ["--page-size", str(page_size), "--chunked-prefill-size", str(chunk)]
    with running_server("--dtype", DTYPE, "--kv-tokens", "8192", *flags) as server:
        yield server


def all_at_once(server: Server) -> list[Answer]:
    return asyncio.run(ask(server, PROMPTS))


def one_by_one(server: Server) -> list[Answer]:
    return [asyncio.run(ask(server, [prompt]))[0] for prompt in PROMPTS]


def assert_greedy(oracle: Oracle, answers: list[Answer]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = oracle.encode(prompt)
        assert answer.prompt_tokens == len(ids), prompt.name
        assert len(answer.ids) == MAX_NEW or answer.ids[-1] == END, prompt.name
        for difference in oracle.differences(ids, answer.ids):
            assert difference.margin < NEAR_TIE, (prompt.name, difference)
            print(f"{prompt.name}: near tie, {difference}")


def test_cold_then_warm(fresh: Server, oracle: Oracle) -> None:
    """Two configurations ask all at once when cold and one by one when warm, two the other way."""
    info = fresh.info()
    page_size, chunk = info["page_size"], info["chunked_prefill_size"]
    alone_first = (page_size, chunk) in ((16, 32), (1, 0))
    first, second = (one_by_one, all_at_once) if alone_first else (all_at_once, one_by_one)
    cold = first(fresh)
    assert_greedy(oracle, cold)
    warm = second(fresh)
    assert_greedy(oracle, warm)
    for prompt, before, after in zip(PROMPTS, cold, warm, strict=True):
        reusable = (before.prompt_tokens - 1) // page_size * page_size
        assert after.cached_tokens == reusable, prompt.name
    fresh.wait_until_idle()
