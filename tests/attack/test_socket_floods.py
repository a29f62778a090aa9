"""Clients of the socket door that flood, lie, or never read: nobody else notices."""

import json
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import zmq
from attack.witness import is_healthy, unharmed
from support.server import Server, wait_for

from tokenloom.client import Client
from tokenloom.wire import codec
from tokenloom.wire.client_messages import Failed, Pong

pytestmark = pytest.mark.attack

RAW_CONNECTIONS = 3000
PING = b'{"type":"ping","seq":7}'
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def generate(**fields: object) -> bytes:
    return json.dumps({"type": "generate", "rid": "r", **fields}).encode()


WRONG: dict[str, bytes] = {
    "nothing": b"",
    "a byte that msgpack has not": b"\xc1",
    "broken JSON": b"{{{",
    "an unknown type": b'{"type":"x"}',
    "no type": b"{}",
    "an unknown key": b'{"type":"ping","seq":1,"zz":1}',
    "lists in lists, packed": b"\x91" * 100_000 + b"\xc0",
    "lists in lists": b"[" * 100_000,
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 GiB of text": b"\xdb\xff\xff\xff\xff",
    "a list of 2**32": b"\xdd\xff\xff\xff\xff",
    "text that is no text": b"\x81\xa4type\xa2\xff\xfe",
    "half of a surrogate pair": b'{"type":"generate","rid":"r","text":"\\ud800"}',
    "a long rid": generate(text="a")[:-1] + b',"rid":"' + b"a" * 1_000_000 + b'"}',
    "a temperature that is no number": packed(
        type="generate", rid="r", text="a", sampling={"temperature": float("nan")}
    ),
    "an infinite temperature": packed(
        type="generate", rid="r", text="a", sampling={"temperature": float("inf")}
    ),
    "a negative id": generate(input_ids=[-1]),
    "an id of 41 bits": generate(input_ids=[1 << 40]),
    "no ids": generate(input_ids=[]),
    "two million ids": generate(input_ids=[1] * 1_300_000),
    "a priority of 41 bits": generate(text="a", priority=1 << 40),
    "an unknown role": generate(messages=[{"role": "evil", "content": "a"}]),
    "a message of 5 MiB": b" " * (5 << 20),
}


class Dealer:
    """A ZeroMQ client in a context of its own: leaving it drops what was not sent."""

    def __init__(self, server: Server, **options: int | bytes) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in {"LINGER": 0, "RCVTIMEO": 30_000, **options}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(server.door)

    def __enter__(self) -> "Dealer":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def ask(self, frame: bytes) -> msgspec.Struct:
        self.socket.send(frame)
        return codec.decode_to_client(self.socket.recv())

    def flood(self, frames: Iterator[bytes], most: int) -> int:
        """Send without reading until nothing is taken any more; how many were."""
        for sent in range(most):
            try:
                self.socket.send(next(frames), zmq.DONTWAIT)
            except zmq.Again:
                if not self.socket.poll(200, zmq.POLLOUT):
                    return sent
        return most


def assert_door_answers(server: Server) -> None:
    with Dealer(server) as dealer:
        assert isinstance(dealer.ask(PING), Pong)


def test_wrong_messages(server: Server) -> None:
    with unharmed(server):
        for name, frame in WRONG.items():
            with Dealer(server) as dealer:
                answer = dealer.ask(frame)
            assert isinstance(answer, Failed), name
            assert 400 <= answer.status < 500, name
            assert len(answer.message) < 5000
        assert_door_answers(server)


def mutated(seed: int) -> Iterator[bytes]:
    """Good messages with bytes changed, added, and cut off."""
    chance = random.Random(seed)
    good = [PING, generate(text="a", sampling={"max_new_tokens": 1, "stop": ["x"]}, user="u")]
    good += [b'{"type":"abort","rid":"r"}', b'{"type":"unload_lora","seq":1,"lora_name":"x"}']
    good += [msgspec.msgpack.encode(msgspec.json.decode(one)) for one in good]
    while True:
        frame = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 3)):
            where = chance.randrange(len(frame) + 1)
            many = chance.randint(1, 6)
            frame[where : where + chance.choice((0, many))] = chance.randbytes(
                chance.choice((0, many))
            )
        yield bytes(frame)


def big_requests() -> Iterator[bytes]:
    frame = generate(input_ids=[1] * 400_000)
    while True:
        yield frame


def pings() -> Iterator[bytes]:
    while True:
        yield PING


@pytest.mark.parametrize(
    ("frames", "most"),
    [(pings(), 50_000), (mutated(1), 20_000), (big_requests(), 60)],
    ids=["pings", "mutated messages", "big requests"],
)
def test_clients_that_flood_and_leave(server: Server, frames: Iterator[bytes], most: int) -> None:
    with unharmed(server) as witness:
        for _ in range(3):
            with Dealer(server, SNDHWM=1000) as dealer:
                assert dealer.flood(frames, most) > 0
            witness.gets_on()
        assert_door_answers(server)


def test_a_client_that_never_reads(server: Server) -> None:
    with unharmed(server) as witness:
        with Dealer(server, RCVHWM=1) as dealer:
            for number in range(20):
                dealer.socket.send(generate(text="hi", rid=f"s{number}", sampling=LONG))
            dealer.flood(pings(), 20_000)
            assert_door_answers(server)
            witness.gets_on()
        wait_for(lambda: server.info()["front"]["requests_in_flight"] <= 1, 60)


def test_a_borrowed_identity_aborts_nothing(server: Server) -> None:
    with Dealer(server, IDENTITY=b"victim") as victim, Dealer(server, IDENTITY=b"victim") as thief:
        victim.socket.send(generate(text="hi", rid="v", sampling={"max_new_tokens": 60}))
        thief.socket.send(b'{"type":"abort","rid":"v"}')
        while (kind := json.loads(victim.socket.recv()))["type"] == "delta":
            pass
        assert kind["type"] == "done"
        assert kind["finish_reason"] in ("stop", "length")


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * RAW_CONNECTIONS:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * RAW_CONNECTIONS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_thousands_of_raw_connections(server: Server) -> None:
    """Half of them greet as ZMTP does, half speak HTTP; HTTP keeps files of its own."""
    raw: list[socket.socket] = []
    with unharmed(server) as witness:
        try:
            for number in range(RAW_CONNECTIONS):
                plain = socket.socket(socket.AF_UNIX)
                raw.append(plain)
                plain.connect(server.door.removeprefix("ipc://"))  # waits for room in the queue
                plain.settimeout(30)
                with suppress(ConnectionError):  # it has made room for a later one
                    plain.send((b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n")[number % 2])
            assert is_healthy(server)
            assert_door_answers(server)
            witness.gets_on()
        finally:
            for plain in raw:
                plain.close()
        with Client(server.door) as client:
            assert client.complete("hi", max_new_tokens=2).token_ids
