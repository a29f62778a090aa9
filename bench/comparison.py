"""Comparison: medians, ratios and tables from repeated measurements of several engines.

`peers` fills it in; nothing here runs or prints anything.
"""

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

import msgspec

from .peer_cases import Case, Metric
from .report import number, table

QUIET = 0.03  # a larger foreign share than this makes a measurement pessimistic


class Measurement(msgspec.Struct, frozen=True):
    """One repetition of a case; `numbers` is empty if it did not end in time."""

    engine: str
    case: str
    repetition: int
    numbers: dict[str, float]
    errors: dict[str, int]
    short_answers: int  # with fewer tokens than requested
    engine_cpu: float  # shares of all cores
    harness_cpu: float
    foreign_cpu: float
    lag_p99_ms: float
    note: str = ""


class EngineReport(msgspec.Struct, frozen=True):
    name: str
    ours: bool
    command: tuple[str, ...]
    start_seconds: float | None = None
    sample: str = ""  # continuation of a fixed prompt, on which the engines must agree
    failure: str = ""


class Ratio(msgspec.Struct, frozen=True):
    """Our result against a peer's; `times` above 1 means ours is better."""

    case: str
    metric: str
    unit: str
    engine: str
    value: float
    best_peer: str
    peer_value: float
    times: float


class Comparison(msgspec.Struct):
    machine: dict[str, str | int]
    model: str
    repetitions: int
    foreign_cpu_before: float
    engines: list[EngineReport] = []
    measurements: list[Measurement] = []

    def medians(self, engine: str, case: str) -> dict[str, float]:
        """Return medians over the completed repetitions; empty if there are none."""
        found = [m.numbers for m in self.measurements if (m.engine, m.case) == (engine, case)]
        found = [numbers for numbers in found if numbers]
        keys = found[0] if found else {}
        return {key: _median(numbers[key] for numbers in found) for key in keys}

    def ratios(self, case: Case) -> list[Ratio]:
        """Compare each of our engines with the best peer, metric by metric."""
        ours = [one.name for one in self.engines if one.ours]
        peers = [one.name for one in self.engines if not one.ours]
        ratios = []
        for metric in case.metrics:
            best = self._best(peers, case, metric)
            for name in ours:
                value = self.medians(name, case.name).get(metric.key, math.nan)
                if best is not None and not math.isnan(value):
                    ratios.append(_ratio(case, metric, (name, value), best))
        return ratios

    def _best(self, engines: Iterable[str], case: Case, metric: Metric) -> tuple[str, float] | None:
        values = [
            (name, self.medians(name, case.name).get(metric.key, math.nan)) for name in engines
        ]
        values = [(name, value) for name, value in values if not math.isnan(value)]
        pick = max if metric.higher_is_better else min
        return pick(values, key=lambda pair: pair[1], default=None)

    def show(self, case: Case) -> str:
        """Format the medians of a case, one line per engine, with reasons for doubt."""
        header = ["", *(f"{m.key}, {m.unit}" for m in case.metrics), "foreign CPU", "failed"]
        rows = []
        for engine in self.engines:
            mine = [m for m in self.measurements if (m.engine, m.case) == (engine.name, case.name)]
            if mine:
                medians = self.medians(engine.name, case.name)
                cells = [number(medians.get(m.key, math.nan)) for m in case.metrics]
                rows.append([engine.name, *cells, _noise(mine), _failures(mine)])
        shown = table(header, rows) if rows else "not measured"
        return f"{case.name}: {case.about}\n{shown}"

    def show_ratios(self, cases: Iterable[Case]) -> str:
        header = ["case", "metric", "ours", "", "best peer", "", "times better"]
        rows = [
            [
                ratio.case,
                f"{ratio.metric}, {ratio.unit}",
                ratio.engine,
                number(ratio.value),
                ratio.best_peer,
                number(ratio.peer_value),
                f"{ratio.times:.2f}",
            ]
            for case in cases
            for ratio in self.ratios(case)
        ]
        return table(header, rows) if rows else "no ratios: nothing to compare"

    def to_values(self, cases: Iterable[Case]) -> dict[str, Any]:
        """Return all measurements, medians and ratios for JSON."""
        cases = list(cases)
        medians = {
            case.name: {
                one.name: found
                for one in self.engines
                if (found := self.medians(one.name, case.name))
            }
            for case in cases
        }
        plain: dict[str, Any] = msgspec.to_builtins(self)
        ratios = [ratio for case in cases for ratio in self.ratios(case)]
        return {**plain, "medians": medians, "ratios": ratios}


def _ratio(case: Case, metric: Metric, ours: tuple[str, float], peer: tuple[str, float]) -> Ratio:
    over, under = (ours[1], peer[1]) if metric.higher_is_better else (peer[1], ours[1])
    times = over / under if under else math.nan
    return Ratio(case.name, metric.key, metric.unit, *ours, *peer, times)


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def _noise(measurements: list[Measurement]) -> str:
    worst = max(m.foreign_cpu for m in measurements)
    return f"{worst:.1%}" + (" (!)" if worst > QUIET else "")


def _failures(measurements: list[Measurement]) -> str:
    """Describe failed requests, short answers and repetitions without a result."""
    requests = sum(sum(m.errors.values()) for m in measurements)
    short = sum(m.short_answers for m in measurements)
    without = sum(not m.numbers for m in measurements)
    said = [f"{requests}"]
    said += [f"{short} short"] if short else []
    said += [f"{without} runs"] if without else []
    return ", ".join(said)
