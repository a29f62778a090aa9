"""The published form on real sockets: frames that other programs read, and the replay."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from tokenloom.scheduler_proc.kv_event_publisher import END_OF_REPLAY, BadAddress, KVEventPublisher
from tokenloom.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

DEADLINE_MS = 10_000
Context = zmq.Context[zmq.Socket[bytes]]


@contextmanager
def publishing(tmp_path: Path) -> Iterator[tuple[KVEventPublisher, Context, str, str]]:
    context: Context = zmq.Context()
    pub, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = KVEventPublisher(context, pub, replay)
    try:
        yield publisher, context, pub, replay
    finally:
        publisher.close()
        context.destroy(linger=0)


def connected(context: Context, kind: int, address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
    socket.connect(address)
    return socket


def subscribed(publisher: KVEventPublisher, context: Context, address: str) -> "zmq.Socket[bytes]":
    """A subscription travels; batches are sent until the first one comes through."""
    sub = connected(context, zmq.SUB, address)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sent = 1
    publisher.publish([AllBlocksCleared()])
    while not sub.poll(20):
        publisher.publish([AllBlocksCleared()])
        sent += 1
    last = -1
    while last != sent - 1:
        last = int.from_bytes(sub.recv_multipart()[1], "big")
    return sub


def replayed(context: Context, address: str, request: bytes) -> list[tuple[int, object]]:
    dealer = connected(context, zmq.DEALER, address)
    dealer.send_multipart([b"", request])
    got: list[tuple[int, object]] = []
    with dealer:
        while True:
            empty, seq, payload = dealer.recv_multipart()
            assert empty == b""
            if seq == END_OF_REPLAY:
                assert payload == b""
                return got
            got.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))


def test_three_frames_as_others_read_them(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, context, address, _):
        sub = subscribed(publisher, context, address)
        publisher.publish([BlockStored([-5, 6], None, [1, 2, 3, 4], 2), BlockRemoved([6])])
        publisher.publish([])
        publisher.publish([BlockStored([7], -5, [8, 9], 2), AllBlocksCleared()])
        topic, seq, payload = sub.recv_multipart()
        assert (topic, len(seq)) == (b"", 8)
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1.7e9
        assert rank == 0
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [-5, 6],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
            },
            {"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU"},
        ]
        topic, after, payload = sub.recv_multipart()
        assert int.from_bytes(after, "big") == int.from_bytes(seq, "big") + 1
        assert [one["type"] for one in msgspec.msgpack.decode(payload)[1]] == [
            "BlockStored",
            "AllBlocksCleared",
        ]


def test_a_reader_that_missed_some_asks_again(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, context, _, address):
        for i in range(5):
            publisher.publish([BlockRemoved([i])])
        # The thread takes batches in order, but serves readers when it finds them.
        while len(replayed(context, address, bytes(8))) < 5:
            pass
        got = replayed(context, address, (3).to_bytes(8, "big"))
        assert [seq for seq, _ in got] == [3, 4]
        assert got[0][1][1] == [{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}]
        assert replayed(context, address, (99).to_bytes(8, "big")) == []


def test_a_reader_that_makes_no_sense_does_no_harm(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, context, _, address):
        rude = connected(context, zmq.DEALER, address)
        rude.send(b"what?")
        rude.send_multipart([b"", b"x" * 100, b""])
        publisher.publish([AllBlocksCleared()])
        while not replayed(context, address, bytes(8)):
            pass
        assert not rude.poll(0)


def test_an_address_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    context: Context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(BadAddress, match=f"at tcp://127.0.0.1:{port}: Address already in use"):
        KVEventPublisher(context, f"tcp://127.0.0.1:{port}", None)
    with pytest.raises(BadAddress, match="at nonsense: Invalid argument"):
        KVEventPublisher(context, "inproc://free", "nonsense")
    taken.close()
    context.term()  # returns: no socket of theirs is left
