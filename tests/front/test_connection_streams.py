"""Connections over a fake transport: any cut of any requests gives the same answers in their order.

Broken bytes give one error at the end, and always leave the connection in a phase that ends.
"""

import asyncio
import gc
import json
import random
import re
import weakref

import pytest
import uvicorn
from front.echo_door import Door, submitted, turn
from uvicorn.server import ServerState

from tokenloom.tokenizer_proc.doors.connection import HttpConnection, http_protocol
from tokenloom.tokenizer_proc.doors.phases import Phase

ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Pipe(asyncio.Transport):
    """Keeps what is written; reading is paused and resumed as asked."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.paused = False
        self.half_closed = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: bytes) -> None:
        assert not self.closed
        assert not self.half_closed
        self.written += data

    def write_eof(self) -> None:
        self.half_closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False


class Client:
    def __init__(self, door: Door) -> None:
        self.state = ServerState()
        config = uvicorn.Config(door.app, log_config=None, lifespan="off", proxy_headers=False)
        config.load()
        self.pipe = Pipe()
        self.connection: HttpConnection = http_protocol(10)(config, self.state, {})
        self.connection.connection_made(self.pipe)

    async def send(self, data: bytes) -> None:
        """As a kernel would: nothing is handed over while reading is paused."""
        async with asyncio.timeout(20):
            while self.pipe.paused:
                await turn()
        if not self.pipe.closed:
            self.connection.data_received(data)

    async def answered(self) -> None:
        """Until the server waits for more bytes, or for the end."""
        async with asyncio.timeout(20):
            await turn()
            while self.phase is Phase.ANSWER or (self.connection._received and not self.ending):
                await turn()
            for _ in range(5):  # a body that is complete, and bad, is answered a moment later
                await turn()

    async def leave(self) -> None:
        self.connection.connection_lost(None)
        async with asyncio.timeout(20):
            while self.state.tasks:
                await turn()

    @property
    def ending(self) -> bool:
        return self.phase in (Phase.LINGER, Phase.CLOSING)

    @property
    def phase(self) -> Phase:
        return self.connection._progress.phase


def request(rng: random.Random, index: int) -> tuple[bytes, bytes]:
    """A request and the text that only its answer has."""
    text = f"r{index}-" + "y" * rng.choice([1, 3, 40])
    pad = "x" * rng.choice([0, 10, 3000])
    body = json.dumps({"text": text, "pad": pad}).encode()
    head = b"Host: localhost\r\nContent-Type: application/json\r\n"
    if rng.random() < 0.3:
        head += b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    if rng.random() < 0.2:
        head += b"X-Pad: " + b"z" * rng.choice([100, 5000]) + b"\r\n"
    if rng.random() < 0.4:
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        cut = rng.randrange(1, len(body))
        parts = (body[:cut], body[cut:]) if cut < len(body) else (body,)
        framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        framed = body
    noise = b"\r\n" * rng.choice([0, 0, 1])
    return noise + b"POST /generate HTTP/1.1\r\n" + head + framed, f'"text":"{text}"'.encode()


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    longest = rng.choice([1 << 20, 5000, 700, 60])
    cut = []
    while data:
        size = rng.randint(1, longest)
        cut.append(data[:size])
        data = data[size:]
    return cut


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_of_good_requests(door: Door, seed: int) -> None:
    rng = random.Random(seed)
    requests = [request(rng, index) for index in range(rng.randint(1, 12))]

    async def scenario() -> bytes:
        client = Client(door)
        for piece in pieces(rng, b"".join(data for data, _ in requests)):
            await client.send(piece)
            if rng.random() < 0.5:
                await turn()
        await client.answered()
        assert client.phase is Phase.IDLE
        assert not client.pipe.closed
        await client.leave()
        return client.pipe.written

    written = door.run(scenario())
    assert ANSWER.findall(written) == [b"200"] * len(requests)
    places = [written.index(text) for _, text in requests]
    assert places == sorted(places)


@pytest.mark.parametrize("seed", range(150))
def test_broken_bytes(door: Door, seed: int) -> None:
    """A few bytes of good requests are changed, lost or doubled."""
    rng = random.Random(seed)
    data = bytearray(b"".join(request(rng, index)[0] for index in range(rng.randint(1, 4))))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))

    async def scenario() -> bytes:
        client = Client(door)
        for piece in pieces(rng, bytes(data)):
            await client.send(piece)
        await client.answered()
        assert client.connection._progress.deadline is not None
        if client.ending:
            assert client.pipe.half_closed or client.pipe.closed
        await client.leave()
        return client.pipe.written

    statuses = ANSWER.findall(door.run(scenario()))
    assert set(statuses) <= {b"200", b"400", b"403", b"404", b"405", b"413", b"415", b"431"}
    assert door.front.in_flight == 0


def test_reading_pauses_behind_an_answer(door: Door) -> None:
    """A client may send ahead, but only so much is kept for it."""
    door.scheduler.hold = True

    async def scenario() -> None:
        client = Client(door)
        body = b'{"text": "a"}'
        await client.send(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        await turn()
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sent = 0
        while not client.pipe.paused:
            client.connection.data_received(health)
            sent += 1
        assert sent * len(health) < 20_000
        assert client.pipe.written == b""
        await client.leave()

    door.run(scenario())
    assert door.front.in_flight == 0


POST = b'POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"text": "a"}'


@pytest.mark.parametrize(
    ("sent", "phase", "status"),
    [
        (b"", Phase.FRESH, [b"503"]),
        (b"POST /gen", Phase.HEAD, [b"503"]),
        (POST[:-1], Phase.BODY, [b"503"]),
        (POST, Phase.IDLE, [b"200"]),
    ],
)
def test_whoever_gives_way_is_told(
    door: Door, sent: bytes, phase: Phase, status: list[bytes]
) -> None:
    async def scenario() -> bytes:
        client = Client(door)
        await client.send(sent)
        await client.answered()
        assert client.phase is phase
        client.connection.give_way()
        assert client.pipe.closed
        await client.leave()
        return client.pipe.written

    written = door.run(scenario())
    assert ANSWER.findall(written) == status
    assert (b"retry-after: 1\r\n" in written) == (status == [b"503"])


def test_a_request_that_the_end_of_the_server_cuts(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> bytes:
        client = Client(door)
        await client.send(POST)
        await submitted(door)
        (task,) = client.state.tasks
        task.cancel()
        await asyncio.wait([task])
        assert client.phase is Phase.LINGER
        await client.leave()
        return client.pipe.written

    written = door.run(scenario())
    assert ANSWER.findall(written) == [b"503"]
    assert b"shutting down" in written
    assert door.front.in_flight == 0


@pytest.mark.parametrize("sent", [b"", b"\0", POST, POST + b"GET /hea", POST[:-1]])
def test_a_closed_connection_leaves_no_garbage(door: Door, sent: bytes) -> None:
    """It is freed at once, not when the collector of cycles comes by."""

    async def scenario() -> weakref.ref[HttpConnection]:
        client = Client(door)
        await client.send(sent)
        await client.answered()
        await client.leave()
        return weakref.ref(client.connection)

    gc.collect()
    gc.disable()
    try:
        assert door.run(scenario())() is None
    finally:
        gc.enable()
