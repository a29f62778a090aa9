"""LogLimit: rate limit for log lines that a peer can cause at will.

Used where frames, messages and connections are logged. Lines left out are counted; the next line
that passes gives their number.
"""

import logging
import time
from collections.abc import Callable

LINES = 3
SECONDS = 10.0


class LogLimit:
    """Logger that passes at most `lines` lines in `seconds` to `log`."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        lines: int = LINES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0  # lines passed and left out
        self._log = log
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._since = -seconds  # start of the current period
        self._logged = 0  # in this period
        self._left_out = 0  # since the last line

    def warning(self, text: str, *args: object) -> None:
        self.log(logging.WARNING, text, *args)

    def info(self, text: str, *args: object) -> None:
        self.log(logging.INFO, text, *args)

    def log(self, level: int, text: str, *args: object) -> None:
        self.count += 1
        now = self._clock()
        if now - self._since >= self._seconds or self.count == 1:
            self._since, self._logged = now, 0
        if self._logged >= self._lines:
            self._left_out += 1
            return
        self._logged += 1
        if self._left_out:
            text += " (and %d more like it before)"
            args = (*args, self._left_out)
            self._left_out = 0
        self._log.log(level, text, *args)
