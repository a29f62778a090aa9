"""The ZeroMQ message transport protocol (ZMTP 3, RFC 37), on the listening side. PURE.

One `Zmtp` per connection: bytes in, whole messages out, and the bytes that the protocol itself
answers. It uses the NULL mechanism and acts as a ROUTER. Input that it does not understand raises
ProtocolError; the partial message that it holds is of bounded size.

libzmq is not used on this side: its I/O thread reads without a bound per message part, cannot be
told to end a connection, and aborts the whole process when a peer that it stopped reading from
sends a PING and leaves (libzmq issue 4364).
"""

import struct
from enum import Enum

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = SIGNATURE + b"\x03\x01" + _MECHANISM + bytes(32)  # version 3.1, not a server of keys
_MECHANISM_AT = 12

_MORE, _LONG, _COMMAND = 1, 2, 4
_PEER_TYPES = (b"DEALER", b"REQ", b"ROUTER")
MAX_COMMAND_BYTES = 4096
MAX_PARTS = 16  # frames per message; the door answers 3 to 16 with an error, not a disconnect
_MAX_CONTEXT_BYTES = 16  # of a PING; the PONG echoes it


class ProtocolError(Exception):
    """The peer violates the protocol or a limit; the message says how."""


class State(Enum):
    GREETING = "greeting"
    HANDSHAKE = "handshake"
    READY = "ready"


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = (_MORE if more else 0) | (_COMMAND if command else 0)
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return struct.pack(">BQ", flags | _LONG, len(body)) + body


def message(parts: list[bytes]) -> bytes:
    last = len(parts) - 1
    return b"".join(frame(part, more=index < last) for index, part in enumerate(parts))


def command(name: bytes, body: bytes) -> bytes:
    return frame(bytes((len(name),)) + name + body, command=True)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


READY = command(b"READY", _property(b"Socket-Type", b"ROUTER"))
PING = command(b"PING", b"\0\0")  # no time to live: the peer decides for itself


class Zmtp:
    """Parser of one peer's input: `feed` bytes, call `next_message`, and send `outgoing`."""

    def __init__(self, max_message_bytes: int) -> None:
        self.state = State.GREETING
        self.minor = 0
        self.outgoing = bytearray(GREETING)  # the caller sends it and clears it
        self._limit = max_message_bytes
        self._input = bytearray()
        self._at = 0  # where the next frame begins in the input
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    @property
    def answers_pings(self) -> bool:
        """Whether the peer answers PING, which ZMTP 3.0 does not have."""
        return self.state is State.READY and self.minor > 0

    @property
    def held_bytes(self) -> int:
        """Bytes that were fed and are not yet returned in a message."""
        return len(self._input) - self._at + self._parts_bytes

    def feed(self, data: bytes) -> None:
        del self._input[: self._at]
        self._at = 0
        self._input += data

    def next_message(self) -> list[bytes] | None:
        """The frames of the next whole message; None until more bytes come."""
        if self.state is State.GREETING and not self._read_greeting():
            return None
        while (got := self._next_frame()) is not None:
            flags, body = got
            if flags & _COMMAND:
                self._obey(body)
            else:
                self._parts.append(body)
                self._parts_bytes += len(body)
                if not flags & _MORE:
                    parts, self._parts, self._parts_bytes = self._parts, [], 0
                    return parts
        return None

    def _read_greeting(self) -> bool:
        """Check the greeting as soon as its bytes come; True when it is complete."""
        start = self._input[: len(GREETING)]
        if not start:
            return False
        if start[0] != SIGNATURE[0]:
            raise ProtocolError("this is not ZMTP")
        if len(start) >= len(SIGNATURE) and not start[len(SIGNATURE) - 1] & 1:
            raise ProtocolError("ZMTP 1 is not spoken here")
        if len(start) > len(SIGNATURE) and start[len(SIGNATURE)] < 3:
            raise ProtocolError(f"ZMTP {start[len(SIGNATURE)]} is not spoken here, 3 is")
        if len(start) < len(GREETING):
            return False
        mechanism = bytes(start[_MECHANISM_AT : _MECHANISM_AT + len(_MECHANISM)])
        if mechanism != _MECHANISM:
            raise ProtocolError(f"mechanism {mechanism!r}, expected NULL")
        self.minor = start[len(SIGNATURE) + 1] if start[len(SIGNATURE)] == 3 else 1
        self._at = len(GREETING)
        self.state = State.HANDSHAKE
        self.outgoing += READY
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        there = len(self._input) - self._at
        if there < 2:
            return None
        flags = self._input[self._at]
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"frame flags {flags:#x}")
        head = 9 if flags & _LONG else 2
        if there < head:
            return None
        size = int.from_bytes(self._input[self._at + 1 : self._at + head])
        self._check_size(flags, size)
        if there < head + size:
            return None
        begin = self._at + head
        self._at = begin + size
        return flags, bytes(memoryview(self._input)[begin : self._at])

    def _check_size(self, flags: int, size: int) -> None:
        if flags & _COMMAND:
            if size > MAX_COMMAND_BYTES:
                raise ProtocolError(f"a command of {size} bytes; {MAX_COMMAND_BYTES} are allowed")
            return
        if self.state is not State.READY:
            raise ProtocolError("a message before the handshake was over")
        if self._parts_bytes + size > self._limit:
            raise ProtocolError(f"a message above {self._limit} bytes")
        if len(self._parts) >= MAX_PARTS:
            raise ProtocolError(f"a message of more than {MAX_PARTS} frames")

    def _obey(self, body: bytes) -> None:
        name, rest = _split(body)
        if self.state is State.HANDSHAKE:
            if name != b"READY":
                raise ProtocolError(f"command {name[:16]!r} during the handshake")
            _check_peer(rest)
            self.state = State.READY
        elif name == b"PING":
            if len(rest) < 2:
                raise ProtocolError("a PING without its time to live")
            self.outgoing += command(b"PONG", rest[2 : 2 + _MAX_CONTEXT_BYTES])
        # PONG needs no action: any byte counts as life. RFC 37: ignore unknown commands.


def _split(body: bytes) -> tuple[bytes, bytes]:
    """Split a command or property into its name and the rest; raise ProtocolError without one."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ProtocolError("a command or property without a name")
    return body[1:end], body[end:]


def _check_peer(properties: bytes) -> None:
    kind = b""
    while properties:
        name, rest = _split(properties)
        size = int.from_bytes(rest[:4])
        if len(rest) < 4 + size:
            raise ProtocolError("a property is cut short")
        if name.lower() == b"socket-type":
            kind = rest[4 : 4 + size]
        properties = rest[4 + size :]
    if kind not in _PEER_TYPES:
        raise ProtocolError(f"a socket of type {kind[:16]!r} cannot talk to this one")
