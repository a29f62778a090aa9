"""Client: the same answers as AsyncClient gives, without an event loop of the caller's."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from door_fakes import FakeStream, Served, served_in_thread, wait_until

from tokenloom.client import Client, RequestRefused, RequestTimeout, ServerGone, Timeouts
from tokenloom.wire.client_messages import Usage
from tokenloom.wire.messages import Finish

STOP = Finish("stop", matched=7)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Served]:
    with served_in_thread(tmp_path) as setup:
        yield setup


def two_pieces(stream: FakeStream) -> None:
    stream.push("Hel", (1, 2))
    stream.push("lo", (3,), STOP)


def one_piece(stream: FakeStream) -> None:
    stream.push("x", (1,))


def test_stream_complete_and_ping(setup: Served) -> None:
    setup.front.on_submit = two_pieces
    with Client(setup.address) as client:
        assert client.ping().model == "fake-model"
        answer = client.generate("hey", temperature=0)
        assert "".join(delta.text for delta in answer) == "Hello"
        assert (answer.text, answer.token_ids) == ("Hello", [1, 2, 3])
        assert (answer.finish_reason, answer.matched_stop) == ("stop", 7)
        assert answer.usage == Usage(3, 3, 3)
        assert client.flush_cache(0.5) == 50
        assert client.load_lora("a", "/a", pinned=True) == ["a"]
        assert client.loras() == ["a"]
        assert client.unload_lora("a") == []
        done = client.complete(messages=[{"role": "user", "content": "hey"}])
        assert (done.text, done.finish_reason) == ("Hello", "stop")
        with pytest.raises(RuntimeError, match="only once"):
            next(iter(answer))


def test_leaving_the_loop_aborts(setup: Served) -> None:
    setup.front.on_submit = one_piece
    with Client(setup.address) as client:
        answer = client.generate("x")
        for _ in answer:
            break
        assert answer.finish_reason == "abort"
        wait_until(lambda: setup.front.streams[0].closed)
        answer = client.generate("y")
        pieces = iter(answer)
        next(pieces)
        answer.close()
        assert next(pieces, None) is None
        wait_until(lambda: setup.front.streams[1].closed)


def test_closing_the_client_ends_what_another_thread_reads(setup: Served) -> None:
    client = Client(setup.address)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.complete, "x")
        wait_until(lambda: len(setup.front.streams) == 1)
        client.close()
        client.close()
        with pytest.raises(ServerGone, match="closed"):
            reading.result()
    with pytest.raises(ServerGone, match="closed"):
        client.ping()
    wait_until(lambda: setup.front.streams[0].closed)
    names = [thread.name for thread in threading.enumerate()]
    assert "tokenloom-client" not in names


def test_threads_share_a_client(setup: Served) -> None:
    setup.front.on_submit = lambda stream: stream.push(str(stream.input_ids[0]), (1,), STOP)
    with Client(setup.address) as client, ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda number: client.complete(input_ids=[number]).text, range(40))
        assert list(texts) == [str(number) for number in range(40)]


def test_errors_are_raised_in_the_caller(setup: Served, tmp_path: Path) -> None:
    with Client(setup.address, timeout=Timeouts(answer=0.05)) as client:
        with pytest.raises(RequestRefused, match="top_p"):
            client.complete("x", top_p=0)
        with pytest.raises(ValueError, match="exactly one"):
            client.complete()
        with pytest.raises(RequestTimeout):
            next(iter(client.generate("x")))
        wait_until(lambda: setup.front.streams[0].closed)
    with (
        Client(f"ipc://{tmp_path}/none.sock", timeout=Timeouts(connect=0.05)) as client,
        pytest.raises(ServerGone, match="no server"),
    ):
        client.ping()
