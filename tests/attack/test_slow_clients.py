"""Connections that say little, nothing, or do not read: cut off in the documented times, and in
nobody's way. One test has them all at once, for each must only be waited for.
"""

import json
import resource
import selectors
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from attack.witness import connect, is_healthy, post_head, unharmed
from support.server import Server, wait_for

from tokenloom.tokenizer_proc.limits import (
    BODY_GRACE_SECONDS,
    FIRST_BYTE_SECONDS,
    HEAD_SECONDS,
    IDLE_SECONDS,
    SEND_STALL_SECONDS,
)

pytestmark = pytest.mark.attack

LATE_S = 20.0  # a busy machine may be late with a deadline, never early
CROWD = 2060
GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = post_head("/generate", "Transfer-Encoding: chunked")
# What is sent at once, what follows every second, the statuses of all answers, and after how many
# seconds the connection is closed.
SLOW: dict[str, tuple[bytes, bytes, list[int], float]] = {
    "nothing": (b"", b"", [], FIRST_BYTE_SECONDS),
    "a line break, then nothing": (b"\r\n", b"", [], FIRST_BYTE_SECONDS),
    "line breaks": (b"\r\n", b"\r\n", [], FIRST_BYTE_SECONDS),
    "half a head": (GET, b"", [408], HEAD_SECONDS),
    "a head by bytes": (GET + b"X-A: ", b"a", [408], HEAD_SECONDS),
    "no body": (post_head("/generate", "Content-Length: 100"), b"", [408], BODY_GRACE_SECONDS),
    "a body by bytes": (
        post_head("/generate", "Content-Length: 1000000"),
        b" ",
        [408],
        BODY_GRACE_SECONDS,
    ),
    "chunks without an end": (CHUNKED, b"1\r\n \r\n", [408], BODY_GRACE_SECONDS),
    "the head of a chunk by bytes": (CHUNKED, b"0", [408], BODY_GRACE_SECONDS),
    "a body that was refused": (
        post_head("/generate", "Content-Length: 999999999"),
        b" ",
        [413],
        0.0,  # it hears the end at once; what it still sends is thrown away for a while
    ),
    "one request, then nothing": (GET + b"\r\n", b"", [200], IDLE_SECONDS),
    "one request, then line breaks": (GET + b"\r\n", b"\r\n", [200], IDLE_SECONDS),
}


class Slow:
    """One connection of `SLOW`, watched until the server closes it."""

    def __init__(self, server: Server, first: bytes, drip: bytes) -> None:
        self.socket = connect(server)
        self.socket.sendall(first)
        self.socket.setblocking(False)
        self.heard = b""
        self.closed_after: float | None = None
        self._drip = drip
        self._began = self._dripped = time.monotonic()

    def look(self) -> bool:
        """Send and read what is due; whether it is closed."""
        now = time.monotonic()
        try:
            if self._drip and now > self._dripped + 1:
                self.socket.send(self._drip)
                self._dripped = now
            part = self.socket.recv(1 << 16)
            self.heard += part
            closed = not part
        except BlockingIOError:
            closed = False
        except ConnectionError:
            closed = True
        if closed and self.closed_after is None:
            self.closed_after = now - self._began
        return closed

    @property
    def statuses(self) -> list[int]:
        heads = self.heard.split(b"HTTP/1.1 ")[1:]
        return [int(head[:3]) for head in heads if head[:3].isdigit()]


def test_every_slow_connection_is_closed_in_time(server: Server) -> None:
    with unharmed(server):
        slow = {name: Slow(server, *case[:2]) for name, case in SLOW.items()}
        left = dict(slow)

        def all_closed() -> bool:
            for name in [name for name, one in left.items() if one.look()]:
                left.pop(name).socket.close()
            return not left

        longest = max(seconds for *_, seconds in SLOW.values())
        try:
            wait_for(all_closed, longest + LATE_S, every=0.1)
        finally:
            for one in left.values():
                one.socket.close()
        for name, (_, _, statuses, seconds) in SLOW.items():
            one = slow[name]
            assert one.statuses == statuses, name
            assert one.closed_after is not None
            assert seconds - 1 <= one.closed_after <= seconds + LATE_S, name


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CROWD:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CROWD, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("first", [b"", b"\r\n", GET], ids=["silent", "line break", "half a head"])
def test_a_crowd_that_says_nothing_locks_nobody_out(server: Server, first: bytes) -> None:
    crowd: list[socket.socket] = []
    with unharmed(server) as witness:
        try:
            for _ in range(CROWD):
                crowd.append(connect(server))
                crowd[-1].sendall(first)
            for _ in range(20):
                assert is_healthy(server)
            witness.gets_on()
        finally:
            for one in crowd:
                one.close()


def test_readers_that_stop_are_aborted(server: Server) -> None:
    """Their requests end, whatever the answer is sent as, and their pages are free."""
    sampling = {"max_new_tokens": 7000, "ignore_eos": True}
    body = json.dumps({"text": "hi", "stream": True, "sampling_params": sampling}).encode()
    request = post_head("/generate", f"Content-Length: {len(body)}") + body
    readers = [connect(server, receive_buffer=4096) for _ in range(2)]
    for reader in readers:
        reader.sendall(request)
    with selectors.DefaultSelector() as selector:  # they have begun to answer
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        wait_for(lambda: len(selector.select(1)) == len(readers), 60)
    wait_for(lambda: in_flight(server) == 0, 4 * SEND_STALL_SECONDS + 60, every=0.5)
    for reader in readers:
        reader.close()
    server.wait_until_idle()


def in_flight(server: Server) -> int:
    count: int = httpx.get(f"{server.url}/get_server_info").json()["front"]["requests_in_flight"]
    return count
