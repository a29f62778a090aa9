"""KVEventPublisher: publish changes of the prefix cache on a PUB socket; replay recent batches.

Made by server.py for --kv-events; event_loop.py passes it each step's events. A thread owns the
sockets and the recent batches, so the loop only encodes and never waits. A slow subscriber misses
batches, sees gaps in the sequence numbers, and may request a replay.

Published: three frames, topic (empty), sequence number (8 bytes, big-endian, from 0), KVEventBatch.
Replay: a request is one frame with the first number wanted; the replies are one message per batch
still kept, then one with number -1 and no batch, each behind an empty frame as REQ expects.
"""

import threading
import time
from collections import deque

import msgspec
import zmq

from ..wire.channel import LINGER_MS
from ..wire.kv_events import KVEvent, KVEventBatch

KEPT_BATCHES = 10_000  # available for replay
PUBLISH_HWM = 100_000  # batches queued for one slow subscriber before it misses some
MAX_REQUEST_BYTES = 1024  # ZeroMQ disconnects a peer that sends more
SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
_TO_THREAD = "inproc://kv-events"
_STOP = b""  # distinct from every encoded batch


class BadAddress(ValueError):
    """An address of --kv-events or --kv-events-replay cannot be bound."""


class KVEventPublisher:
    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, replay: str | None
    ) -> None:
        """Bind the sockets and start the thread; raises BadAddress."""
        self._encoder = msgspec.msgpack.Encoder()
        server = _Server(context, endpoint, replay)
        self._to_thread = context.socket(zmq.PUSH)
        self._to_thread.setsockopt(zmq.SNDHWM, 0)
        self._to_thread.connect(_TO_THREAD)
        self._thread = threading.Thread(target=server.run, name="kv-events")
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        if events:
            batch = KVEventBatch(time.time(), events)
            self._to_thread.send(self._encoder.encode(batch), zmq.DONTWAIT)

    def close(self) -> None:
        self._to_thread.send(_STOP)
        self._thread.join()
        self._to_thread.close()


class _Server:
    """Owner of the sockets and kept batches; runs in the publisher's thread."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, replay: str | None
    ) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._seq = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pub = self._bind(context, zmq.PUB, endpoint)
        self._replay = self._bind(context, zmq.ROUTER, replay) if replay else None
        self._from_loop = self._bind(context, zmq.PULL, _TO_THREAD)

    def _bind(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str
    ) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, PUBLISH_HWM)
        if address == _TO_THREAD:
            socket.setsockopt(zmq.RCVHWM, 0)
        else:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close()
            why = f"KV events cannot be published at {address}: {zmq.strerror(error.errno or 0)}"
            raise BadAddress(why) from error
        return socket

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._from_loop, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._from_loop in ready:
                payload = self._from_loop.recv()
                if payload == _STOP:
                    break
                self._publish(payload)
            elif self._replay is not None:
                self._answer(self._replay)
        self._close()

    def _publish(self, payload: bytes) -> None:
        self._kept.append((self._seq, payload))
        self._pub.send_multipart([b"", _seq_frame(self._seq), payload])
        self._seq += 1

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Replay kept batches; ignore a malformed request, for which the protocol has no reply."""
        reader, *rest = replay.recv_multipart()
        if len(rest[-1]) != SEQ_BYTES:
            return
        first = int.from_bytes(rest[-1], "big")
        for seq, payload in self._kept:
            if seq >= first:
                replay.send_multipart([reader, b"", _seq_frame(seq), payload])
        replay.send_multipart([reader, b"", END_OF_REPLAY, b""])

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()


def _seq_frame(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")
