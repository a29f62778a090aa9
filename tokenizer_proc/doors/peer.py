"""Peer: one connection of a client to the socket door.

Reads and writes bytes, limits the work per turn, and counts the client's missed heartbeats. Made by
the router, which gets its messages and its end. The meaning of messages does not enter.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ..limits import (
    MAX_SOCKET_BYTES,
    MAX_SOCKET_CONNECTIONS,
    MAX_SOCKET_PARTIAL_BYTES,
    MAX_SOCKET_UNREAD_BYTES,
    SOCKET_HANDSHAKE_SECONDS,
    SOCKET_HEARTBEAT_SECONDS,
    SOCKET_MESSAGE_SECONDS,
    SOCKET_STALL_SECONDS,
)
from . import zmtp

TURN_MESSAGES = 16  # of one client, before the event loop serves others
TURN_BYTES = 64 << 10
MISSED_HEARTBEATS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoorLimits:
    """Limits of the socket door; see limits.py."""

    connections: int = MAX_SOCKET_CONNECTIONS
    message_bytes: int = MAX_SOCKET_BYTES
    partial_bytes: int = MAX_SOCKET_PARTIAL_BYTES
    unread_bytes: int = MAX_SOCKET_UNREAD_BYTES
    stall_seconds: float = SOCKET_STALL_SECONDS
    heartbeat_seconds: float = SOCKET_HEARTBEAT_SECONDS
    handshake_seconds: float = SOCKET_HANDSHAKE_SECONDS
    message_seconds: float = SOCKET_MESSAGE_SECONDS


class PeerGone(Exception):
    """The peer has left."""


@dataclass(frozen=True)
class PeerEvents:
    """Callbacks to the router."""

    came: Callable[["Peer"], None]
    message: Callable[["Peer", list[bytes]], None]
    turned: Callable[["Peer"], None]  # after a turn of reading
    left: Callable[["Peer", str], None]  # once, with the reason if we closed it


class Peer(asyncio.Protocol):
    def __init__(self, limits: DoorLimits, events: PeerEvents) -> None:
        self.gone = False
        self.missed = 0  # heartbeats in a row without a byte
        self.began = 0.0  # loop time of the connect, then of the unfinished message's first bytes
        self.zmtp = zmtp.Zmtp(limits.message_bytes)
        self._limits = limits
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._writable = True
        self._turning = False  # a next turn is scheduled
        self._reading = True

    @property
    def ready(self) -> bool:
        return self.zmtp.state is zmtp.State.READY

    @property
    def stuck(self) -> bool:
        """Whether the client reads too little; reading from it pauses until it catches up."""
        return not self._writable

    def send(self, parts: list[bytes]) -> bool:
        """Send parts; return False if too much is unsent. Raises PeerGone."""
        if self.gone or self._transport is None:
            raise PeerGone
        if not self._writable:
            return False
        self._transport.write(zmtp.message(parts))
        return True

    def ping(self) -> None:
        if self._transport is not None and self._writable and self.zmtp.answers_pings:
            self._transport.write(zmtp.PING)

    def drop(self, why: str) -> None:
        """Close the connection now and discard unsent bytes."""
        if self.gone or self._transport is None:
            return
        self._why = why
        self._transport.abort()
        self._leave()

    def close(self) -> None:
        """Close the connection when all bytes are sent."""
        if self._transport is not None:
            self._transport.close()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's class does not derive from it
        self.began = self._loop.time()
        self._transport.set_write_buffer_limits(high=self._limits.unread_bytes)
        self._events.came(self)
        self._say()

    def data_received(self, data: bytes) -> None:
        if self.gone:
            return
        if self.ready and not self.zmtp.held_bytes:
            self.began = self._loop.time()
        self.zmtp.feed(data)
        if not self._turning:
            self._turn()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._turn_later()

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()

    # -- inside

    def _turn_later(self) -> None:
        if not self._turning and not self.gone:
            self._turning = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turning = False
        if not self.gone:
            self._turn()

    def _turn(self) -> None:
        """Handle a few messages; resume reading once all are handled and the client reads."""
        self.missed = 0
        try:
            exhausted = self._handle_some()
        except zmtp.ProtocolError as error:
            self.drop(str(error))
        except Exception:  # an error with one client must not end the door for all
            log.exception("a message of a socket client broke the door")
            self.drop("internal error")
        if self.gone:
            return
        self._say()
        self._events.turned(self)
        self._read_on(exhausted)

    def _handle_some(self) -> bool:
        """Handle up to TURN_MESSAGES; return True if no whole message is left."""
        handled_bytes = 0
        for _ in range(TURN_MESSAGES):
            held = self.zmtp.held_bytes
            if not self._writable or handled_bytes > TURN_BYTES:
                return False
            parts = self.zmtp.next_message()
            if parts is None:
                return True
            self.began = self._loop.time()
            handled_bytes += held - self.zmtp.held_bytes
            self._events.message(self, parts)
            if self.gone:
                return True
        return False

    def _say(self) -> None:
        if self.zmtp.outgoing and not self.gone and self._transport is not None:
            self._transport.write(bytes(self.zmtp.outgoing))
            self.zmtp.outgoing.clear()

    def _read_on(self, exhausted: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        reading = exhausted and self._writable
        if reading != self._reading:
            self._reading = reading
            (transport.resume_reading if reading else transport.pause_reading)()
        if not exhausted and self._writable:
            self._turn_later()

    def _leave(self) -> None:
        if not self.gone:
            self.gone = True
            self._events.left(self, self._why)
