"""/flush_cache: asked of the scheduler, waited for in bounds, one at a time."""

import asyncio

import pytest
from front.echo_door import Door, Exchange, turn

from tokenloom.tokenizer_proc import front
from tokenloom.wire.messages import Drained, FlushOut, FlushReq


async def asked(door: Door) -> FlushReq:
    async with asyncio.timeout(10):
        while not door.scheduler.of(FlushReq):
            await turn()
    return door.scheduler.of(FlushReq)[-1]


def test_the_pages_that_were_freed(door: Door) -> None:
    answer = door.call("POST", "/flush_cache")
    assert (answer.status, answer.json()) == (200, {"pages": 7, "success": True})
    assert door.scheduler.sent == [FlushReq(1, 0.0)]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_no_get_changes_anything(door: Door, method: str) -> None:
    """Any web page can make a browser send one."""
    answer = door.call(method, "/flush_cache")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert door.scheduler.sent == []


def test_the_time_to_wait(door: Door) -> None:
    assert door.call("POST", "/flush_cache?timeout=2.5&x=1", b"{}").status == 200
    assert door.call("POST", "/flush_cache?timeout=600").status == 200
    assert [message.timeout_s for message in door.scheduler.of(FlushReq)] == [2.5, 600.0]


@pytest.mark.parametrize("timeout", ["", "x", "-1", "600.1", "nan", "inf", "1e400", "%00"])
def test_a_wrong_time_is_named(door: Door, timeout: str) -> None:
    answer = door.call("POST", f"/flush_cache?timeout={timeout}")
    assert (answer.status, answer.error()["param"]) == (400, "timeout")
    assert door.scheduler.sent == []


def test_a_refusal_gives_the_reason(door: Door) -> None:
    door.scheduler.flush = (False, "2 requests run and 1 waits", 0)
    answer = door.call("POST", "/flush_cache")
    assert (answer.status, answer.error()["code"]) == (409, "conflict")
    assert answer.error()["message"] == "2 requests run and 1 waits"
    assert "retry-after" not in answer.headers


def test_a_scheduler_that_says_nothing(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "FLUSH_ANSWER_SECONDS", 0.01)
    door.scheduler.flush = None
    answer = door.call("POST", "/flush_cache")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    door.scheduler.flush = (True, "", 3)
    assert door.call("POST", "/flush_cache").json()["pages"] == 3


def test_one_waits_at_a_time_and_only_as_long_as_its_client(door: Door) -> None:
    door.scheduler.flush = None

    async def scenario() -> tuple[Exchange, Exchange]:
        first = door.open("POST", "/flush_cache?timeout=600")
        request = await asked(door)
        second = await door.open("POST", "/flush_cache").end()
        first.leave()
        await first.end()
        assert not first.status
        door.front.dispatch(FlushOut(request.seq, True, "", 9))  # nobody waits for it
        door.scheduler.flush = (True, "", 4)
        return second, await door.open("POST", "/flush_cache").end()

    second, third = door.run(scenario())
    assert (second.status, third.json()["pages"]) == (409, 4)
    assert "another flush" in second.error()["message"]


def test_while_loading_and_when_the_scheduler_ends(door: Door) -> None:
    assert Door().call("POST", "/flush_cache").status == 503
    door.scheduler.flush = None

    async def scenario() -> Exchange:
        call = door.open("POST", "/flush_cache?timeout=600")
        await asked(door)
        door.front.drain(1.0)
        door.front.dispatch(Drained())
        return await call.end()

    answer = door.run(scenario())
    assert (answer.status, answer.headers["retry-after"]) == (503, "10")
