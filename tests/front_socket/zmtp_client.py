"""A client that writes ZMTP by hand, so that it can send what libzmq would not."""

import socket
from contextlib import suppress

from tokenloom.tokenizer_proc.doors import zmtp


def ready(kind: bytes = b"DEALER") -> bytes:
    value = len(kind).to_bytes(4) + kind
    return zmtp.command(b"READY", b"\x0bSocket-Type" + value + b"\x08Identity" + bytes(4))


def connect(address: str) -> socket.socket:
    transport, _, rest = address.partition("://")
    if transport == "ipc":
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(rest)
        return plain
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)))


def greeted(address: str) -> socket.socket:
    """Connected, and the handshake is over on both sides."""
    plain = connect(address)
    plain.settimeout(10)
    plain.sendall(zmtp.GREETING + ready())
    heard = b""
    while len(heard) < len(zmtp.GREETING + zmtp.READY):
        heard += plain.recv(1 << 16)
    assert heard == zmtp.GREETING + zmtp.READY
    return plain


def send_until_stuck(plain: socket.socket, data: bytes, most: int) -> int:
    """Send `data` over and over without reading; the bytes that were taken, at most `most`."""
    sent = 0
    plain.settimeout(0.02)
    with suppress(TimeoutError, ConnectionError):
        while sent < most:
            sent += plain.send(data)
    return sent


def is_closed(plain: socket.socket) -> bool:
    """Read until the other end hangs up; False if it has not within the timeout."""
    plain.settimeout(10)
    try:
        while plain.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True
