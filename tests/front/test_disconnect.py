"""A client that leaves becomes an AbortReq at once, in every phase of its request."""

import asyncio

import pytest
from front.echo_door import Door, Exchange, submitted, turn

from tokenloom.wire.messages import AbortReq, Finish, StrOut

PATHS = ["/v1/chat/completions", "/v1/completions", "/generate"]
PAYLOAD = {"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}]}


async def aborted(door: Door, count: int = 1) -> None:
    for _ in range(10):
        await turn()
    assert len(door.scheduler.of(AbortReq)) == count


@pytest.fixture
def held(door: Door) -> Door:
    door.scheduler.hold = True
    return door


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_while_the_request_waits(held: Door, path: str, stream: bool) -> None:
    """ABT-02, ABT-08: here and below, a client that leaves is an abort and never an exception."""

    async def scenario() -> Exchange:
        call = held.open("POST", path, PAYLOAD | {"stream": stream})
        await submitted(held)
        call.leave()
        await aborted(held)
        return await call.end()

    assert held.run(scenario()).status == 0
    assert held.front.in_flight == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_between_two_rows(held: Door, path: str, stream: bool) -> None:
    async def scenario() -> Exchange:
        call = held.open("POST", path, PAYLOAD | {"stream": stream})
        await submitted(held)
        held.scheduler.row(StrOut(1, "a", (97,)))
        await turn()
        call.leave()
        await aborted(held)
        held.scheduler.row(StrOut(1, "LATE", (98,)))
        return await call.end()

    assert b"LATE" not in held.run(scenario()).body


@pytest.mark.parametrize("path", PATHS)
def test_while_a_write_is_blocked(held: Door, path: str) -> None:
    async def scenario() -> None:
        call = held.open("POST", path, PAYLOAD | {"stream": True})
        await submitted(held)
        call.stalled = True
        held.scheduler.row(StrOut(1, "a", (97,)))
        await turn()
        call.leave()
        await aborted(held)
        await call.end()

    held.run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_during_the_body(held: Door, path: str) -> None:
    async def scenario() -> Exchange:
        call = held.open("POST", path, [b"{", b""])
        call._pieces.clear()
        call.leave()
        return await call.end()

    assert held.run(scenario()).status == 0
    assert held.scheduler.sent == []


def test_all_prompts_of_a_list(held: Door) -> None:
    async def scenario() -> None:
        call = held.open("POST", "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
        await submitted(held, 3)
        held.scheduler.row(StrOut(2, "", (), Finish("length")))
        await turn()
        call.leave()
        await aborted(held, 2)
        await call.end()

    held.run(scenario())
    assert sorted(message.rid for message in held.scheduler.of(AbortReq)) == [1, 3]


def test_the_handler_is_cancelled(held: Door) -> None:
    async def scenario() -> None:
        call = held.open("POST", "/generate", PAYLOAD | {"messages": None})
        await submitted(held)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        await aborted(held)

    held.run(scenario())


def test_after_the_last_row_nothing_is_aborted(held: Door) -> None:
    async def scenario() -> None:
        call = held.open("POST", "/generate", {"text": "x", "stream": True})
        await submitted(held)
        held.scheduler.row(StrOut(1, "a", (97,), Finish("length")))
        call.leave()
        await call.end()

    held.run(scenario())
    assert held.scheduler.of(AbortReq) == []


def test_a_health_probe_that_leaves(held: Door) -> None:
    async def scenario() -> None:
        call = held.open("GET", "/health_generate")
        await submitted(held)
        call.leave()
        await aborted(held)
        await call.end()

    held.run(scenario())
