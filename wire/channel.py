"""Mailboxes between the processes of one server: one PULL socket per reader, over ipc.

Used by the launcher and its children. The reader binds a mailbox, any number of peers write to it.
A frame that does not decode is counted and dropped. Sends never block and queues are unbounded: the
doors bound what is in flight. The client door, KV events and ranks have their own sockets.
"""

import os
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from . import codec
from .strays import Strays

M = TypeVar("M")
MAX_FRAME_BYTES = 64 << 20
LINGER_MS = 1000  # to deliver the last messages of a process that ends
IPC_PATH_LIMIT = 107  # bytes in a socket path, a limit of the platform


class AddressTooLong(ValueError):
    """An ipc path above the platform's limit; the message says what to change."""


class CannotBind(ValueError):
    """A mailbox cannot be bound; the message names the address and the cause."""


def check_ipc_path(address: str) -> None:
    path = address.removeprefix("ipc://")
    if len(path.encode()) > IPC_PATH_LIMIT:
        raise AddressTooLong(
            f"socket path {path!r} has {len(path.encode())} bytes; the platform allows "
            f"{IPC_PATH_LIMIT}. Set TMPDIR to a shorter directory."
        )


def _options(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def _bind(socket: "zmq.Socket[Any]", address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise CannotBind(
            f"cannot make the socket {address}: {os.strerror(error.errno or 0)}"
        ) from error


class _Decoding(Generic[M]):
    """Decode frames to typed messages; count and drop those that do not decode."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[M]", strays: Strays | None) -> None:
        self._decoder = decoder
        self.strays = strays or Strays()

    def decode(self, frames: list[bytes]) -> list[M]:
        messages = []
        for frame in frames:
            try:
                messages.append(self._decoder.decode(frame))
            except (msgspec.DecodeError, RecursionError) as error:
                self.strays.drop_frame(frame, error)
        return messages


class Outbox:
    """Sends messages to one peer's mailbox; the peer may bind it later."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        check_ipc_path(address)
        self._socket = context.socket(zmq.PUSH)
        _options(self._socket)
        self._socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(codec.encode(message), zmq.DONTWAIT)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close the socket; messages not sent yet have `linger_ms` to leave."""
        self._socket.close(linger_ms)


class Mailbox(Generic[M]):
    """Mailbox for a process that reads it in a synchronous loop."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        decoder: "msgspec.msgpack.Decoder[M]",
        strays: Strays | None = None,
    ) -> None:
        check_ipc_path(address)
        self._socket = context.socket(zmq.PULL)
        _options(self._socket)
        _bind(self._socket, address)
        self._decoding = _Decoding(decoder, strays)
        self.strays = self._decoding.strays

    def receive(self, timeout_ms: int | None = 0) -> list[M]:
        """Return all messages that are there; wait up to `timeout_ms` (None: forever) for the
        first."""
        if timeout_ms != 0 and not self._socket.poll(timeout_ms):
            return []
        return self._decoding.decode(_drain(self._socket))

    def close(self) -> None:
        self._socket.close()


class AsyncMailbox(Generic[M]):
    """Mailbox for a process that reads it in an asyncio loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        decoder: "msgspec.msgpack.Decoder[M]",
        strays: Strays | None = None,
    ) -> None:
        check_ipc_path(address)
        self._socket = context.socket(zmq.PULL)
        _options(self._socket)
        _bind(self._socket, address)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._decoding = _Decoding(decoder, strays)
        self.strays = self._decoding.strays

    async def receive(self) -> list[M]:
        """Wait for a first message, then return all that are there."""
        first = await self._socket.recv_multipart()
        return self._decoding.decode([b"".join(first), *_drain(self._plain)])

    def close(self) -> None:
        self._socket.close()


def _drain(socket: "zmq.Socket[bytes]") -> list[bytes]:
    frames: list[bytes] = []
    while True:
        try:
            parts = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return frames
        frames.append(b"".join(parts))
