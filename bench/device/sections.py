"""Runs sections one after the other, each within its own time and with its own failure.

Called by check.py. A section that raises is reported and the others still run. One that hangs
cannot be stopped from within: the alarm of the whole run reports what there is, and ends it.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .results import CheckFailed, Report, SectionResult, Skip, Status

Clock = Callable[[], float]
LEAST_SECONDS = 3.0  # with less left, a section is not begun


@dataclass(frozen=True)
class Section:
    name: str
    seconds: float  # that it may take
    run: Callable[[Report], None]


class Course:
    """The results so far, and the section that is running; read by the alarm from its thread."""

    def __init__(
        self,
        total_seconds: float,
        after: Callable[[list[SectionResult]], None] = lambda results: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Call `after` with the results after each section."""
        self.results: list[SectionResult] = []
        self._after = after
        self._clock = clock
        self._end = clock() + total_seconds
        self._running: tuple[str, Report, float] | None = None
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def play(self, sections: Sequence[Section]) -> list[SectionResult]:
        for section in sections:
            result = self._play(section)
            with self._lock:
                self._running = None
                self.results.append(result)
            self._after(self.results)
        return self.results

    def _play(self, section: Section) -> SectionResult:
        if self.left < LEAST_SECONDS:
            return SectionResult(section.name, "skipped", 0.0, [], "no time left")
        started = self._clock()
        report = Report(min(section.seconds, self.left), self._clock)
        with self._lock:
            self._running = (section.name, report, started)
        status: Status = "ok"
        reason = ""
        try:
            section.run(report)
        except Skip as why:
            status, reason = "skipped", str(why)
        except CheckFailed as wrong:
            status, reason = "failed", str(wrong)
        except Exception as error:  # whatever broke, the other sections are of use
            traceback.print_exc()
            status, reason = "failed", f"{type(error).__name__}: {error}"
        seconds = self._clock() - started
        return _result(section.name, status, seconds, report, reason)

    def cut_short(self) -> list[SectionResult]:
        """Return the results so far, with the running section as failed. Thread-safe."""
        with self._lock:
            results = list(self.results)
            if self._running is not None:
                name, report, started = self._running
                seconds = self._clock() - started
                why = "still running when the time of the whole check was over"
                results.append(_result(name, "failed", seconds, report, why))
        return results


def _result(
    name: str, status: Status, seconds: float, report: Report, reason: str
) -> SectionResult:
    return SectionResult(name, status, seconds, list(report.figures), reason)
