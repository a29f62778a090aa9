"""What every attack has beside it: a client with a good stream, and the server's own footprint.

`unharmed` is the verdict: the stream got on during the attack, no process was replaced, memory grew
within a bound, and files and threads are back where they were.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
from support.server import CHILDREN, PATIENCE_S, Server, wait_for

# What a process may keep after an attack: caches and allocators fill once; the scheduler's KV pool
# of some 550 MB becomes resident page by page.
GROWTH_BYTES = {"tokenizer": 128 << 20, "detokenizer": 64 << 20, "scheduler": 700 << 20}
# Libraries open files and start threads when they are first used, in no order that could be told.
SPARE_FILES = 8
SPARE_THREADS = 8
_LONG = {"temperature": 0.0, "max_new_tokens": 1500, "ignore_eos": True}


class Witness:
    """Streams one answer after the other and counts the events; an error ends it."""

    def __init__(self, server: Server) -> None:
        self.events = 0
        self.complaints: list[str] = []
        self._url = f"{server.url}/generate"
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def gets_on(self, events: int = 20) -> None:
        """Wait for so many more events of the stream."""
        aim = self.events + events
        wait_for(lambda: self.events >= aim or self.complaints, 90)
        assert not self.complaints

    def leave(self) -> None:
        self._left.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._left.is_set() and not self.complaints:
                try:
                    self._read_one(client)
                except httpx.HTTPError as error:
                    self.complaints.append(repr(error))

    def _read_one(self, client: httpx.Client) -> None:
        body = {"text": "Once upon a time", "stream": True, "sampling_params": _LONG}
        with client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                self.complaints.append(answer.read().decode())
            for line in answer.iter_lines():
                if self._left.is_set():
                    return
                if line.startswith('data: {"error"'):
                    self.complaints.append(line)
                self.events += line.startswith("data: {")


def footprint(server: Server) -> dict[str, tuple[int, int, int, int]]:
    """Pid, resident bytes, files and threads of each child."""
    return {
        name: (process.pid, process.memory_info().rss, process.num_fds(), process.num_threads())
        for name, process in children(server).items()
    }


def children(server: Server) -> dict[str, psutil.Process]:
    return {name: server.child(name) for name in sorted(CHILDREN)}


def is_healthy(server: Server) -> bool:
    """Asked by a client that has no connection yet."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    return False


def is_idle(server: Server) -> bool:
    """Nothing runs or waits, no page is held."""
    info = server.info()
    stats = info["scheduler"]
    held = stats and (stats["running"], stats["waiting"], stats["used_tokens"])
    return held == (0, 0, 0) and info["front"]["requests_in_flight"] == 0


@contextmanager
def unharmed(server: Server, *, nonsense: bool = False) -> Iterator[Witness]:
    """Nobody but the attacker notices what is done in the block.

    `nonsense`: the scheduler is told what its own front would not say, and may count that.
    """
    before = footprint(server)
    witness = Witness(server)
    try:
        witness.gets_on()
        yield witness
        witness.gets_on()
        assert is_healthy(server)
    finally:
        witness.leave()
    wait_for(lambda: is_idle(server), 60)
    assert nonsense or server.stats()["violations_total"] == 0
    deadline = time.monotonic() + 60
    while grown := overgrown(before, footprint(server)):
        assert time.monotonic() < deadline, grown
        time.sleep(0.5)
    assert "Traceback" not in server.log


def overgrown(
    before: dict[str, tuple[int, int, int, int]],
    after: dict[str, tuple[int, int, int, int]],
) -> list[str]:
    """The children that were replaced or keep more than they may."""
    found = []
    for name, (pid, rss, files, threads) in before.items():
        assert after[name][0] == pid, f"{name} is another process now"
        kept = (after[name][1] - rss, after[name][2] - files, after[name][3] - threads)
        if kept[0] > GROWTH_BYTES[name] or kept[1] > SPARE_FILES or kept[2] > SPARE_THREADS:
            found.append(f"{name}: {kept}")
    return found


def connect(server: Server, receive_buffer: int = 0) -> socket.socket:
    plain = socket.socket()
    if receive_buffer:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.settimeout(30)
    plain.connect(("127.0.0.1", server.port))
    return plain


def post_head(route: str, *lines: str, version: str = "1.1") -> bytes:
    """The head of a POST with these header lines beside Host, without a length of its own."""
    head = [f"POST {route} HTTP/{version}", "Host: 127.0.0.1", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1")


def raw_answer(server: Server, request: bytes) -> tuple[int, bytes]:
    """Send bytes and read until the server hangs up or has sent one whole answer."""
    got = b""
    with connect(server) as plain:
        with suppress(ConnectionError):  # refused before all of it was sent
            plain.sendall(request)
        with suppress(ConnectionError):
            while not _is_whole(got) and (part := plain.recv(1 << 16)):
                got += part
    assert got.startswith(b"HTTP/1.1 "), got[:100]
    return int(got.split(b" ", 2)[1]), got


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if found and line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return False


def assert_error_shape(answer: bytes) -> None:
    """The body is an error as OpenAI's clients parse it."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
