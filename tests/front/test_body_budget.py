"""All bodies that are still coming in share one bound."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tokenloom.tokenizer_proc.doors.asgi import Exchange
from tokenloom.tokenizer_proc.doors.body_budget import BodyBudget
from tokenloom.tokenizer_proc.doors.errors import ApiError, ClientGone
from tokenloom.tokenizer_proc.errors import Refused
from tokenloom.tokenizer_proc.limits import MAX_BODIES_BYTES


def exchange(budget: BodyBudget, messages: list[dict[str, Any]], limit: int = 100) -> Exchange:
    said: Iterator[dict[str, Any]] = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(said)

    async def send(message: object) -> None:
        raise AssertionError(message)

    return Exchange({"headers": []}, receive, send, limit, budget)


def piece(size: int, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


@pytest.mark.parametrize("size", [9, 10, 11])
def test_a_body_that_does_not_fit_beside_the_others_is_refused(size: int) -> None:
    budget = BodyBudget(30)
    budget.take(20)
    body = exchange(budget, [piece(5), piece(size - 5, more=False)]).read_body()
    if size <= 10:
        assert asyncio.run(body) == b"x" * size
    else:
        with pytest.raises(Refused) as refused:
            asyncio.run(body)
        assert refused.value.status == 503
    budget.take(10)  # what came of it has been given back


@pytest.mark.parametrize(
    ("end", "error"), [({"type": "http.disconnect"}, ClientGone), (piece(100), ApiError)]
)
def test_a_body_that_never_ends_gives_its_bytes_back(
    end: dict[str, Any], error: type[Exception]
) -> None:
    budget = BodyBudget(20)
    with pytest.raises(error):
        asyncio.run(exchange(budget, [piece(20), end]).read_body())
    budget.take(20)


def test_the_bound_of_a_server() -> None:
    budget = BodyBudget()
    budget.take(MAX_BODIES_BYTES)
    with pytest.raises(Refused):
        budget.take(1)
