"""The lean HTTP client against a server of plain asyncio streams, on both event loops."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from support.fake_openai import FakeOpenAI

from tokenloom.bench.http_stream import Answer, Disconnected, EventSplitter, HttpClient

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


@given(st.lists(st.integers(0, 60), max_size=8))
def test_events_come_out_whole_however_they_are_cut(cuts: list[int]) -> None:
    stream = (
        b'data: {"a": 1}\r\n\r\n: comment\n\ndata:b\n\nevent: x\ndata: \xc3\xa9\n\ndata: [DONE]\n\n'
    )
    edges = [0, *sorted(cuts), len(stream)]
    splitter = EventSplitter()
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert events == [b'{"a": 1}', b"b", b"\xc3\xa9", b"[DONE]"]


def body(model: str) -> bytes:
    return b'{"model": "%s", "prompt": [1], "max_tokens": 2}' % model.encode()


async def post(client: HttpClient, model: str, seen: list[bytes] | None = None) -> Answer:
    events = seen if seen is not None else []
    return await client.post("/v1/completions", body(model), lambda data, _: events.append(data))


def run(loop_factory: Callable[[], Any], work: Any) -> None:  # noqa: ANN401  (any coroutine)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", ["fine", "bytewise"])
def test_a_stream_arrives_and_its_connection_serves_again(
    server: FakeOpenAI, loop: Callable[[], Any], model: str
) -> None:
    async def twice() -> None:
        client = HttpClient(server.base_url, {"Authorization": "Bearer k"})
        for _ in range(2):
            seen: list[bytes] = []
            assert await post(client, model, seen) == Answer(200, b"")
            assert len(seen) == 4  # two tokens, usage, [DONE]
            assert seen[-1] == b"[DONE]"
        client.close()

    run(loop, twice())
    assert server.connections == 1
    assert server.headers[0]["authorization"] == "Bearer k"
    assert server.headers[0]["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("loop", LOOPS)
def test_an_idle_connection_that_the_server_closed_is_replaced(
    server: FakeOpenAI, loop: Callable[[], Any]
) -> None:
    async def thrice() -> None:
        client = HttpClient(server.base_url)
        for _ in range(3):
            assert (await post(client, "closes")).status == 200
        client.close()

    run(loop, thrice())
    assert len(server.asked) == 3


def test_refusals_keep_their_body_and_the_connection(server: FakeOpenAI) -> None:
    async def refused() -> None:
        client = HttpClient(server.base_url)
        for _ in range(2):
            answer = await post(client, "refuses")
            assert answer.status == 503
            assert b"too busy" in answer.body
        client.close()

    asyncio.run(refused())
    assert server.connections == 1


def test_a_connection_lost_within_an_answer_is_told(server: FakeOpenAI) -> None:
    async def cut() -> None:
        client = HttpClient(server.base_url)
        seen: list[bytes] = []
        with pytest.raises(Disconnected):
            await post(client, "cuts", seen)
        assert len(seen) == 1
        client.close()

    asyncio.run(cut())
    assert len(server.asked) == 1, "what has begun to answer is not asked again"


def test_what_the_callback_raises_ends_the_call(server: FakeOpenAI) -> None:
    def complain(_data: bytes, _now: float) -> None:
        raise KeyError("mine")

    async def complaining() -> None:
        client = HttpClient(server.base_url)
        with pytest.raises(KeyError, match="mine"):
            await client.post("/v1/completions", body("fine"), complain)
        client.close()

    asyncio.run(complaining())


def test_cancelling_closes_the_connection(server: FakeOpenAI) -> None:
    async def cancelled() -> None:
        client = HttpClient(server.base_url)
        begun = asyncio.Event()
        work = asyncio.create_task(
            client.post("/v1/completions", body("hangs"), lambda *_: begun.set())
        )
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (await post(client, "fine")).status == 200
        client.close()

    asyncio.run(cancelled())
    assert server.connections == 2


def test_no_server_and_no_http_are_errors() -> None:
    async def nobody() -> None:
        client = HttpClient("http://127.0.0.1:9")
        with pytest.raises(OSError, match=r"."):
            await client.get("/")

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example\r\n\r\n")
        await writer.drain()
        writer.close()

    async def stranger() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ValueError, match="speaks no HTTP"):
            await client.get("/")
        server.close()

    asyncio.run(nobody())
    asyncio.run(stranger())


@pytest.mark.parametrize("url", ["127.0.0.1:3", "ftp://x", "http://", "ipc:///tmp/x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="no http"):
        HttpClient(url)
