"""LogLimit: a bound on how often a line is logged that somebody else can cause at will.

Used by whoever logs about frames, messages and connections. What is left out is counted, and the
next line that is let through says how many there were.
"""

import logging
import time
from collections.abc import Callable

LINES = 3
SECONDS = 10.0


class LogLimit:
    """At most `lines` lines in `seconds` go to `log`."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        lines: int = LINES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0  # all that were to be logged
        self._log = log
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._since = -seconds  # the beginning of the current period
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
