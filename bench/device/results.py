"""What a device check found: figures with their aims, sections, the table and the JSON. PURE.

Sections add figures to their Report while they run, so that what came before an error is kept.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "failed", "skipped"]


class Figure(msgspec.Struct, frozen=True):
    """One number with its aim; NaN (null in JSON) if missing, and `note` says why."""

    name: str
    value: float
    unit: str = ""
    aim: float | None = None
    at_most: bool = False  # the aim is a bound from above
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.aim is None or math.isnan(self.value):
            return ""
        met = self.value <= self.aim if self.at_most else self.value >= self.aim
        return "met" if met else "missed"


class SectionResult(msgspec.Struct, frozen=True):
    name: str
    status: Status
    seconds: float
    figures: list[Figure]
    reason: str = ""  # of a failure, or of skipping it


class Skip(Exception):
    """A section or case cannot run here; the message says why."""


class CheckFailed(Exception):
    """A computed result is wrong; the message says which."""


class Report:
    """Collects a section's figures and tells its remaining time."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.figures: list[Figure] = []
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds of the section's budget."""
        return self._end - self._clock()

    def add(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        aim: float | None = None,
        at_most: bool = False,
        note: str = "",
    ) -> None:
        self.figures.append(Figure(name, value, unit, aim, at_most, note))

    def missing(self, name: str, why: str) -> None:
        self.figures.append(Figure(name, math.nan, note=why))

    def has_time(self, name: str, seconds: float = 0.0) -> bool:
        """Whether another case of about so many seconds may begin; notes it as missing if not."""
        if self.left > seconds:
            return True
        self.missing(name, "no time left")
        return False


def as_text(results: Iterable[SectionResult]) -> str:
    """A short table; aims stand beside the figures that have one."""
    lines = []
    for result in results:
        lines.append(f"{result.name}: {result.status} ({result.seconds:.1f} s) {result.reason}")
        lines[-1] = lines[-1].rstrip()
        for figure in result.figures:
            lines.append("  " + _line(figure))
    return "\n".join(lines)


def _line(figure: Figure) -> str:
    value = "-" if math.isnan(figure.value) else f"{figure.value:.4g} {figure.unit}".rstrip()
    text = f"{figure.name:<46} {value:>16}"
    if figure.aim is not None:
        bound = "at most" if figure.at_most else "at least"
        text += f"  aim {bound} {figure.aim:g}: {figure.verdict or 'unknown'}"
    return (f"{text}  {figure.note}" if figure.note else text).rstrip()


def missed(results: Iterable[SectionResult]) -> list[str]:
    """The figures that are short of their aims."""
    return [
        f"{result.name}: {figure.name}"
        for result in results
        for figure in result.figures
        if figure.verdict == "missed"
    ]
