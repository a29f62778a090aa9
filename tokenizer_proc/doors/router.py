"""The ROUTER under the socket door: its address, its options, and who is connected to it.

Owns the socket, its monitor and the file of an ipc address. Knows bytes only: what a message means
is the door's (socket.py).

That a client left is read from the socket's monitor, whose events name a connection by the same
file descriptor as its messages do. (ROUTER_NOTIFY says it more directly, but only in builds of
ZeroMQ with draft features.) A descriptor is used again by later connections, so the last message of
a client that left may be taken for one of its successor's: then the first send to that client finds
it out, or the end of the successor. A client that stops answering is cut off by the heartbeat, one
that stops reading is bounded by the send queue.
"""

import asyncio
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from ...wire import paths

HARD_MESSAGE_BYTES = 4 * paths.MAX_REQUEST_BYTES  # ZeroMQ hangs up above it, unanswered
UNHANDLED_MESSAGES = 256  # of one client, before ZeroMQ stops reading from it
LINGER_MS = 500  # for the last words of a server that ends


@dataclass(frozen=True)
class DoorLimits:
    unread_messages: int = 1000  # kept for one client, beyond what the kernel's buffers hold
    stall_seconds: float = 10.0  # how long a last word waits for a client that does not read
    heartbeat_seconds: float = 5.0  # three missed ones end the connection


class PeerGone(Exception):
    """The peer has left."""


class Router:
    """Binds when made: zmq.ZMQError, paths.BadAddress or paths.UnsafeDirectory when it cannot."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        limits: DoorLimits,
        on_left: Callable[[bytes], None],
    ) -> None:
        """`on_left` is called with the identity of each client whose connection has ended."""
        self.address = paths.full_address(address)
        self._on_left = on_left
        self._socket = _router(context, self.address, limits)
        self._monitor = _monitor(context, self._socket, f"inproc://socket-door-{id(self)}")
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        self._file = _SocketFile(self.address)
        self._identities: dict[int, set[bytes]] = {}  # by the connection's file descriptor
        self._ended: set[int] = set()  # file descriptors that no connection has now
        self._closed = False
        try:
            self._file.make_way()
            self._socket.bind(self.address)
        except BaseException:
            self._close_sockets()
            raise
        self._file.remember()

    async def receive(self) -> tuple[bytes, list[memoryview]]:
        """The next message of a client that is still there: its identity and its other frames."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._note_pending_events()
            fd = _connection(frames[0])
            if fd in self._ended:
                continue  # said before leaving: nobody waits for the answer
            identity = frames[0].bytes
            if fd is not None:
                self._identities.setdefault(fd, set()).add(identity)
            return identity, [frame.buffer for frame in frames[1:]]

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """False when the client has too much unread; raises PeerGone when it has left."""
        try:
            # Never pending: DONTWAIT settles it within the call.
            sent = self._socket.send_multipart([identity, *frames], zmq.DONTWAIT)
            asyncio.ensure_future(sent).result()
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from error
            raise
        return True

    async def watch(self) -> None:
        """Call `on_left` as clients leave, until cancelled."""
        while not self._closed:
            # Not recv: an event must not wait while a later one is noted.
            await self._monitor.poll()
            self._note_pending_events()

    def close(self) -> None:
        self._closed = True
        self._file.remove()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _note_pending_events(self) -> None:
        """Before a message is handled: all that happened to connections before it was sent."""
        while not self._closed:  # whoever was waiting may be woken by a close
            try:
                self._note(self._events.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _note(self, frames: list[bytes]) -> None:
        event, fd = struct.unpack("=hi", frames[0])
        if event == zmq.EVENT_ACCEPTED:
            self._ended.discard(fd)
            return
        self._ended.add(fd)
        for identity in self._identities.pop(fd, ()):
            self._on_left(identity)


class _SocketFile:
    """The file of an ipc address: a stale one is removed, our own is, another's never."""

    def __init__(self, address: str) -> None:
        transport, _, path = address.partition("://")
        self._path = Path(path) if transport == "ipc" else None
        self._inode: tuple[int, int] | None = None

    def make_way(self) -> None:
        if self._path is None:
            return
        if self._path.parent == paths.door_dir():
            paths.make_door_dir()
        if self._path.exists() and not stat.S_ISSOCK(self._path.lstat().st_mode):
            raise paths.BadAddress(f"{self._path} exists and is not a socket")
        self._path.unlink(missing_ok=True)

    def remember(self) -> None:
        self._inode = self._found()

    def remove(self) -> None:
        """Only while it is ours: a successor on the same port may have replaced it already."""
        if self._path is not None and self._inode is not None and self._found() == self._inode:
            self._path.unlink(missing_ok=True)

    def _found(self) -> tuple[int, int] | None:
        if self._path is None or not self._path.exists():
            return None
        found = os.lstat(self._path)
        return found.st_dev, found.st_ino


def _router(context: zmq.asyncio.Context, address: str, limits: DoorLimits) -> zmq.asyncio.Socket:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that left raises
    router.setsockopt(zmq.LINGER, LINGER_MS)
    router.setsockopt(zmq.MAXMSGSIZE, HARD_MESSAGE_BYTES)
    router.setsockopt(zmq.SNDHWM, limits.unread_messages)
    router.setsockopt(zmq.RCVHWM, UNHANDLED_MESSAGES)
    heartbeat_ms = round(limits.heartbeat_seconds * 1000)
    router.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * heartbeat_ms)
    if "[" in address:
        router.setsockopt(zmq.IPV6, 1)
    return router


def _monitor(
    context: zmq.asyncio.Context, router: zmq.asyncio.Socket, name: str
) -> zmq.asyncio.Socket:
    router.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for us to read
    monitor.connect(name)
    return monitor


def _connection(frame: zmq.Frame) -> int | None:
    """The file descriptor that `frame` came through; None where ZeroMQ does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
