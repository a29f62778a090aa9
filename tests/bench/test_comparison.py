"""Medians, ratios and tables of several engines, with what makes a number doubtful."""

import json
import math

import pytest

from tokenloom.bench.comparison import Comparison, EngineReport, Measurement
from tokenloom.bench.peer_cases import CASES, Case, Metric
from tokenloom.bench.report import as_json, number, table
from tokenloom.bench.workloads import Closed, Open, Source

CASE = Case(
    "x",
    "a case",
    lambda _source: (),
    lambda _records: {},
    (Metric("rate", "tok/s", True), Metric("wait", "ms", False)),
)


def measured(engine: str, rate: float, wait: float, foreign: float = 0.0) -> Measurement:
    return Measurement(
        engine=engine,
        case="x",
        repetition=0,
        numbers={"rate": rate, "wait": wait},
        errors={},
        short_answers=0,
        engine_cpu=0.9,
        harness_cpu=0.01,
        foreign_cpu=foreign,
        lag_p99_ms=0.1,
    )


@pytest.fixture
def comparison() -> Comparison:
    engines = [
        EngineReport("ours", True, ("a",)),
        EngineReport("slow", False, ("b",)),
        EngineReport("fast", False, ("c",)),
    ]
    measurements = [
        *(measured("ours", rate, 10.0) for rate in (90.0, 300.0, 100.0)),
        measured("slow", 20.0, 40.0, foreign=0.2),
        measured("fast", 50.0, 80.0),
    ]
    return Comparison({"cores": 2}, "m", 3, 0.0, engines, measurements)


def test_medians_are_over_repetitions_that_ended(comparison: Comparison) -> None:
    assert comparison.medians("ours", "x") == {"rate": 100.0, "wait": 10.0}
    unended = Measurement("ours", "x", 3, {}, {}, 0, 0.0, 0.0, 0.0, 0.0, "not finished")
    comparison.measurements.append(unended)
    assert comparison.medians("ours", "x") == {"rate": 100.0, "wait": 10.0}
    assert comparison.medians("nobody", "x") == {}


def test_ratios_are_above_one_where_ours_is_better(comparison: Comparison) -> None:
    rate, wait = comparison.ratios(CASE)
    assert (rate.best_peer, rate.times) == ("fast", 2.0)
    assert (wait.best_peer, wait.times) == ("slow", 4.0), "less waiting is better"


def test_no_ratio_without_a_peer_or_a_number(comparison: Comparison) -> None:
    comparison.measurements = [measured("ours", 1.0, math.nan), measured("fast", 2.0, 3.0)]
    (rate,) = comparison.ratios(CASE)
    assert rate.times == 0.5
    comparison.measurements = [measured("ours", 1.0, 1.0)]
    assert comparison.ratios(CASE) == []
    assert "nothing to compare" in comparison.show_ratios([CASE])


def test_a_noisy_line_and_failures_are_marked(comparison: Comparison) -> None:
    broken = Measurement("fast", "x", 1, {}, {"timeout": 2}, 1, 0.0, 0.0, 0.0, 0.0)
    comparison.measurements.append(broken)
    lines = {line.split()[0]: line for line in comparison.show(CASE).splitlines()[2:]}
    assert "20.0% (!)" in lines["slow"]
    assert "(!)" not in lines["ours"]
    assert lines["fast"].endswith("2, 1 short, 1 runs")


def test_everything_goes_to_json(comparison: Comparison) -> None:
    comparison.measurements.append(measured("slow", math.nan, math.nan))
    said = json.loads(as_json(comparison.to_values([CASE])))
    assert said["medians"]["x"]["ours"]["rate"] == 100.0
    assert said["ratios"][0]["times"] == 2.0
    assert said["measurements"][-1]["numbers"]["rate"] is None
    assert said["machine"] == {"cores": 2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_what_they_say(case: Case) -> None:
    parts = case.parts(Source("seed"))
    streams = [stream for part in parts for stream in part]
    shown = [(len(s.sessions), len(s.sessions[0]), len(s.sessions[0][0].tokens)) for s in streams]
    expected = {
        "a": [(4, 1, 128)],
        "b8": [(64, 1, 128)],
        "b32": [(64, 1, 128)],
        "c": [(32, 1, 1056)],
        "d": [(8, 4, 96)],
        "prefill": [(8, 1, 512)],
    }
    if case.name == "e":
        alone, steady, arriving = streams
        assert (alone.pace, steady.pace) == (Closed(8), Closed(8))
        assert isinstance(arriving.pace, Open)
        assert {len(session[0].tokens) for session in arriving.sessions} == {1500}
    else:
        assert shown == expected[case.name]
    assert case.metrics[0].key


def test_no_prompt_comes_twice_in_a_comparison() -> None:
    seeds = [(case, f"{case.name}/{repetition}") for case in CASES for repetition in range(2)]
    fronts = [
        session[0].tokens[:16]
        for case, seed in seeds
        if case.name != "c"
        for part in case.parts(Source(seed))
        for stream in part
        for session in stream.sessions
    ]
    assert len(fronts) == len(set(fronts))


def test_tables_line_up_and_numbers_are_short() -> None:
    assert table(["", "n"], [["a", "1"], ["bcd", "23"]]) == "      n\na     1\nbcd  23"
    assert [number(x) for x in (1234.5, 55.55, 1.234, math.nan)] == ["1234", "55.5", "1.23", "-"]
