"""The 0700 directory that holds the sockets of one server: create, lock, remove, clean up.

Used by the launcher alone. A live launcher holds flock on its directory, which the kernel releases
however the launcher ends; a directory that can be locked is stale and removed. Touches only
directories of this user with this module's prefix.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenloom.wire.channel import check_ipc_path
from tokenloom.wire.config import Links

PREFIX = "tokenloom-run-"

log = logging.getLogger(__name__)


class NoRunDirectory(ValueError):
    """The run directory cannot be made; the message says where, why, and what to change."""


@contextmanager
def run_directory() -> Iterator[str]:
    """Yield a fresh directory under TMPDIR; remove it at the end of the block.

    Raises channel.AddressTooLong if socket paths in it would exceed the platform's limit, and
    NoRunDirectory if the system refuses to make it.
    """
    try:
        base = tempfile.gettempdir()
        for path in Path(base).glob(f"{PREFIX}*"):
            _remove_if_stale(path)
        path, lock = _create(base)
    except OSError as error:
        where = f" in {Path(error.filename).parent}" if error.filename else ""
        raise NoRunDirectory(
            f"cannot make a directory for the server's sockets{where}: {error.strerror}. Set "
            "TMPDIR to a directory with room that you may write to."
        ) from error
    try:
        check_ipc_path(Links(str(path)).detokenizer)  # the longest name in it
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        if path.exists():
            log.warning("could not remove the run directory %s", path)


def _create(base: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        # Until it is locked the directory looks stale, and another launcher may remove it.
        with suppress(FileNotFoundError):
            lock = _lock(path)
            if lock is not None:
                return path, lock


def _remove_if_stale(path: Path) -> None:
    try:
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            return
        lock = _lock(path)
    except FileNotFoundError:  # its launcher has just removed it
        return
    if lock is None:
        return
    log.info("removing %s, left behind by a launcher that was killed", path)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock the directory and return its descriptor; None if another process holds the lock.

    Raises FileNotFoundError if the directory is gone, even if it went just before the lock was
    taken.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(path)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except FileNotFoundError:
        os.close(descriptor)
        raise
    return descriptor
