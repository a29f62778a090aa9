"""How every process writes its log: `[YYYY-MM-DD HH:MM:SS name] message` on standard error.

`configure` is called once at the start of a process, before it opens files. The format is the one
that tools for SGLang's log parse; from a warning on, the message names its severity. A stream that
is closed, full or cannot spell a character never ends a process.
"""

import io
import logging
import os
import sys
from contextlib import suppress

from .secrets import masked

log = logging.getLogger(__name__)


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"[%(asctime)s {process.replace('%', '%%')}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


class _Handler(logging.StreamHandler[io.TextIOWrapper]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that the disk does not take is lost; it is no reason to write a traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def configure(process: str, level: str) -> None:
    """Send all loggers of this process, libraries included, to standard error."""
    _open_standard_streams()
    handler = _Handler(sys.stderr)  # type: ignore[arg-type]
    handler.setFormatter(_Formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries tell about every request or connection at info; that belongs to debugging.
    for chatty in ("httpcore", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def say(line: str) -> None:
    """Write `line` to standard output; where that is not possible, to the log."""
    line = masked(line)
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("standard output takes no line (%s): %s", error.strerror, line)


def let_go() -> None:
    """Drop what standard output and error do not take, or the interpreter's end fails over it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Give descriptors 0 to 2 to nobody else, and spell what a stream cannot encode in ASCII.

    A closed one would be taken by the next file or socket, and get what is written to the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one; children inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
