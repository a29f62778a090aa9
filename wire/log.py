"""Log format of every process: `[YYYY-MM-DD HH:MM:SS name] message` on standard error.

Each process calls `configure` once at its start, before it opens files. Tools for SGLang's log
parse this format; warnings and errors name their severity. A stream that is closed, full or cannot
encode a character never ends a process.
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
        """Drop a line that the stream refuses with OSError, without printing a traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def configure(process: str, level: str) -> None:
    """Send all loggers of this process, libraries included, to standard error."""
    _open_standard_streams()
    handler = _Handler(sys.stderr)  # type: ignore[arg-type]
    handler.setFormatter(_Formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These libraries log every request or connection at info.
    for chatty in ("httpcore", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def say(line: str) -> None:
    """Write `line` to standard output; if that fails, to the log."""
    line = masked(line)
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("standard output takes no line (%s): %s", error.strerror, line)


def let_go() -> None:
    """Flush standard output and error; on failure redirect them to /dev/null, so that exit
    succeeds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Reserve descriptors 0 to 2; make the streams escape what they cannot encode.

    The next opened file or socket would take the number of a closed stream, and receive its output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number, which is this one; children inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
