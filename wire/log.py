"""How every process writes its log: `[YYYY-MM-DD HH:MM:SS name] message` on standard error.

Called once at the start of a process. The format is the one that tools for SGLang's log parse; from
a warning on, the message names its severity.
"""

import logging
import sys


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"[%(asctime)s {process.replace('%', '%%')}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


def configure(process: str, level: str) -> None:
    """Send all loggers of this process, libraries included, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries tell about every request or connection at info; that belongs to debugging.
    for chatty in ("httpcore", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
