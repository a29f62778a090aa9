"""Addresses of the socket door, computed alike by server and clients from the HTTP port.

The front binds the address, clients connect to it. Only one process can bind an HTTP port, and it
does so first, so it may replace the ipc path of that port. Opens no socket.
"""

import os
import stat
import tempfile
from pathlib import Path

from .channel import check_ipc_path
from .limits import MAX_REQUEST_BYTES as MAX_REQUEST_BYTES

LOOPBACK = "127.0.0.1"


class BadAddress(ValueError):
    """An unsupported address of the socket door; the message says what is allowed."""


class UnsafeDirectory(PermissionError):
    """Another user could write or read the directory of the door's sockets."""


def door_dir() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "tokenloom"
    return Path(tempfile.gettempdir()) / f"tokenloom-{os.geteuid()}"


def door_address(port: int) -> str:
    """The default address of the socket door beside HTTP port `port`. Raises AddressTooLong."""
    address = f"ipc://{door_dir()}/port-{port}.sock"
    check_ipc_path(address)
    return address


def find_door(port: int) -> str:
    """Return `door_address` for a client; raises UnsafeDirectory if another user may answer."""
    address = door_address(port)
    if door_dir().exists():
        check_door_dir(door_dir())
    return address


def make_door_dir() -> Path:
    """Create the directory with mode 0700, or check an existing one. Raises UnsafeDirectory."""
    path = door_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check_door_dir(path)
    return path


def check_door_dir(path: Path) -> None:
    """Raise UnsafeDirectory for a link, a foreign owner or any rights of others.

    In a shared directory such as /tmp another user may have created that name first.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeDirectory(f"{path} is not a directory; remove it")
    if found.st_uid != os.geteuid():
        raise UnsafeDirectory(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise UnsafeDirectory(f"{path} is open to other users; chmod 700 {path}")


def full_address(address: str) -> str:
    """Complete a socket address: tcp://:31000 gets the loopback host, an ipc path is kept.

    Raises BadAddress for other transports and for a port that is missing or out of range, and
    AddressTooLong for an ipc path above the platform's limit.
    """
    transport, _, rest = address.partition("://")
    if transport == "ipc" and rest.startswith("/"):
        check_ipc_path(address)
        return address
    host, _, port = rest.rpartition(":")
    if transport == "tcp" and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
        return f"tcp://{host or LOOPBACK}:{int(port)}"
    raise BadAddress(
        f"socket address {address!r} is neither ipc:///absolute/path nor tcp://host:port"
    )
