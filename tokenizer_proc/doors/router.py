"""Router: listens for clients of the socket door and keeps them within its limits.

Owns the listening socket, the file of an ipc address, and the connections (Peers). The meaning of
messages is left to the door (socket.py). However many clients connect, and whatever they send or do
not read, files and memory stay bounded, and only connections at fault are closed.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...wire import paths
from ...wire.log_limit import LogLimit
from .peer import MISSED_HEARTBEATS, DoorLimits, Peer, PeerEvents, PeerGone

__all__ = ["DoorLimits", "Peer", "PeerGone", "Router"]

BACKLOG = 128  # connections that wait to be accepted; their files may briefly exceed the limit
LINGER_SECONDS = 0.5  # most time to send pending bytes at shutdown
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # finds vanished hosts

log = logging.getLogger(__name__)


class Router:
    """Binds when made. Raises paths.BadAddress or paths.UnsafeDirectory when it cannot."""

    def __init__(
        self,
        address: str,
        limits: DoorLimits,
        on_message: Callable[[Peer, list[bytes]], None],
        on_left: Callable[[Peer], None],
    ) -> None:
        self.address = paths.full_address(address)
        self.dropped = LogLimit(log)  # counts the connections that this side closed
        self._limits = limits
        self._on_message = on_message
        self._on_left = on_left
        self._peers: dict[Peer, None] = {}  # in the order in which they connected
        self._partial: dict[Peer, int] = {}  # bytes of messages that are not handled yet
        self._partial_bytes = 0
        self._empty = asyncio.Event()  # no client is connected
        self._empty.set()
        self._closed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._file = _SocketFile(self.address)
        self._file.make_way()
        self._listener = _listen(self.address)
        self._file.remember()

    def __len__(self) -> int:
        return len(self._peers)

    async def serve(self) -> None:
        """Accept clients and drop dead ones, until `close`."""
        loop = asyncio.get_running_loop()
        events = PeerEvents(self._came, self._on_message, self._turned, self._left)

        def make() -> Peer:
            return Peer(self._limits, events)

        if self._listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(make, sock=self._listener, backlog=BACKLOG)
        else:
            self._server = await loop.create_server(make, sock=self._listener, backlog=BACKLOG)
        while not self._closed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat_seconds):
                    await self._closed.wait()
            self._beat(loop.time())

    def close(self) -> None:
        """Stop accepting, and close each connection when all its bytes are sent."""
        self._closed.set()
        self._file.remove()
        if self._server is None:
            self._listener.close()
        else:
            self._server.close()
        for peer in list(self._peers):
            peer.close()

    async def flush(self) -> None:
        """After `close`, wait up to LINGER_SECONDS until all is sent, then drop the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._empty.wait()
        for peer in list(self._peers):
            peer.drop("the server stopped")

    def _came(self, peer: Peer) -> None:
        self._peers[peer] = None
        self._empty.clear()
        if len(self._peers) <= self._limits.connections:
            return
        # Connections without a handshake must not keep out working ones: drop the oldest first.
        greeting = next((one for one in self._peers if not one.ready), peer)
        greeting.drop(f"more than {self._limits.connections} connections")

    def _left(self, peer: Peer, why: str) -> None:
        self._peers.pop(peer, None)
        if not self._peers:
            self._empty.set()
        self._partial_bytes -= self._partial.pop(peer, 0)
        if why:
            self.dropped.info("closed the connection of a socket client: %s", why)
        self._on_left(peer)

    def _turned(self, peer: Peer) -> None:
        """Account for the bytes that `peer` holds; drop oldest partial messages above the limit."""
        held = peer.zmtp.held_bytes
        self._partial_bytes += held - self._partial.pop(peer, 0)
        if held:
            self._partial[peer] = held
        while self._partial_bytes > self._limits.partial_bytes:
            oldest = min(self._partial, key=lambda one: one.began)
            oldest.drop("its unfinished message takes the room of others")

    def _beat(self, now: float) -> None:
        for peer in list(self._peers):
            why = self._verdict(peer, now)
            if why:
                peer.drop(why)
            else:
                peer.missed += 1
                peer.ping()

    def _verdict(self, peer: Peer, now: float) -> str:
        """The reason to close the connection; empty if there is none.

        Heartbeats are counted and not timed, so that a pause of this process makes no peer late.
        """
        age = now - peer.began
        if not peer.ready:
            return "no handshake" if age > self._limits.handshake_seconds else ""
        if peer.missed >= MISSED_HEARTBEATS and (peer.zmtp.answers_pings or peer.stuck):
            return "it shows no life"
        if peer.zmtp.held_bytes and age > self._limits.message_seconds:
            return "its message did not become whole in time"
        return ""


class _SocketFile:
    """The file of an ipc address. Replaces an old socket; at the end removes only its own."""

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
        """Remove the file if it is still ours: a successor may have replaced it already."""
        if self._path is not None and self._inode is not None and self._found() == self._inode:
            self._path.unlink(missing_ok=True)

    def _found(self) -> tuple[int, int] | None:
        if self._path is None or not self._path.exists():
            return None
        found = os.lstat(self._path)
        return found.st_dev, found.st_ino


def _listen(address: str) -> socket.socket:
    transport, _, rest = address.partition("://")
    try:
        if transport == "ipc":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(rest)
            listener.listen(BACKLOG)
            return listener
        host, _, port = rest.rpartition(":")
        host = "0.0.0.0" if host == "*" else host.strip("[]")
        family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise paths.BadAddress(f"cannot listen on {address}: {reason}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted ones inherit it
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return listener
