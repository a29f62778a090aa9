"""Where the socket door of a server is: the one rule that its server and its clients share.

The front binds the address, clients connect to it; both find it from the HTTP port alone. The HTTP
port is bound first and by one process only, so the ipc path of that port is its owner's to take.
Nothing here opens a socket.
"""

import os
import stat
import tempfile
from pathlib import Path

from .channel import check_ipc_path
from .limits import MAX_REQUEST_BYTES as MAX_REQUEST_BYTES

LOOPBACK = "127.0.0.1"


class BadAddress(ValueError):
    """An address that the socket door cannot have; the message says what is allowed."""


class UnsafeDirectory(PermissionError):
    """The directory of the door's sockets could be written or read by somebody else."""


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
    """For clients: `door_address`, but UnsafeDirectory where somebody else could answer there."""
    address = door_address(port)
    if door_dir().exists():
        check_door_dir(door_dir())
    return address


def make_door_dir() -> Path:
    """Create the directory with mode 0700 or check the one there. Raises UnsafeDirectory."""
    path = door_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check_door_dir(path)
    return path


def check_door_dir(path: Path) -> None:
    """Raise UnsafeDirectory for a link, a foreign owner or any right of others.

    In a shared directory such as /tmp somebody else may have come first with that name.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeDirectory(f"{path} is not a directory; remove it")
    if found.st_uid != os.geteuid():
        raise UnsafeDirectory(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise UnsafeDirectory(f"{path} is open to other users; chmod 700 {path}")


def full_address(address: str) -> str:
    """`address` as ZeroMQ wants it: tcp://:31000 means loopback, all else stays as written.

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
