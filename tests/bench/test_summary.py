"""Statistics of requests: percentiles against numpy, and what counts for which number."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.bench.summary import (
    OK,
    STOPPED,
    Record,
    gaps_during_prefill,
    percentile,
    spread,
    summarise,
)

FLOATS = st.floats(-1e9, 1e9, allow_subnormal=False)


def record(*times: float, sent: float = 0.0, outcome: str = OK, tokens: int = 0) -> Record:
    made = Record("x", asked_tokens=tokens, sent=sent, text_times=list(times), outcome=outcome)
    made.ended = times[-1] if times else sent + 1.0
    made.prompt_tokens, made.completion_tokens = 10, tokens
    return made


@given(st.lists(FLOATS, min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    ours = percentile(sorted(values), percent)
    assert ours == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_spread_is_that_of_numpy(values: list[float]) -> None:
    ours = spread([*values, math.nan], scale=2.0)
    doubled = np.array(values) * 2
    assert ours.count == len(values)
    assert ours.mean == pytest.approx(doubled.mean(), rel=1e-9, abs=1e-6)
    assert ours.p90 == pytest.approx(np.percentile(doubled, 90), rel=1e-9, abs=1e-6)
    assert ours.max == doubled.max()


def test_spread_of_nothing_is_nothing() -> None:
    nothing = spread([math.nan])
    assert nothing.count == 0
    assert math.isnan(nothing.p50)


def test_latencies_of_one_request() -> None:
    one = record(1.5, 1.75, 2.25, sent=1.0, tokens=4)
    assert one.ttft == 0.5
    assert one.gaps == [0.25, 0.5]
    assert one.decode_rate == 3 / 0.75


def test_a_request_without_text_has_no_latencies() -> None:
    none = record(sent=1.0)
    assert math.isnan(none.ttft)
    assert none.gaps == []
    assert math.isnan(none.decode_rate)


def test_an_answer_in_one_piece_has_no_decode_rate() -> None:
    assert math.isnan(record(1.0, 1.0, tokens=9).decode_rate)


def test_rates_are_over_first_sent_to_last_ended() -> None:
    summary = summarise(
        [record(2.0, 3.0, sent=1.0, tokens=2), record(4.0, 5.0, sent=2.0, tokens=6)]
    )
    assert summary.seconds == 4.0
    assert summary.output_tok_s == 8 / 4
    assert summary.total_tok_s == (8 + 20) / 4
    assert summary.requests_per_s == 2 / 4
    assert summary.e2e_ms.max == 3000.0


def test_failed_requests_count_as_errors_and_in_no_latency() -> None:
    failed = [record(9.0, outcome="timeout"), record(outcome="HTTP 503"), record(outcome="timeout")]
    summary = summarise([record(1.0, 1.1, tokens=2), *failed])
    assert (summary.requests, summary.ok) == (4, 1)
    assert summary.errors == {"timeout": 2, "HTTP 503": 1}
    assert summary.ttft_ms.count == 1
    assert summary.output_tokens == 2


def test_stopped_requests_are_no_requests_but_their_tokens_and_gaps_count() -> None:
    summary = summarise([record(1.0, tokens=1), record(1.0, 1.5, 2.0, outcome=STOPPED)])
    assert (summary.requests, summary.errors) == (1, {})
    assert summary.output_tokens == 1 + 3
    assert summary.inter_token_ms.count == 2
    assert summary.e2e_ms.count == 1


def test_short_answers_are_told() -> None:
    short = record(1.0, 2.0, tokens=2)
    short.asked_tokens = 3
    assert summarise([short, record(1.0, tokens=1)]).short_answers == 1


def test_lateness_is_that_of_scheduled_requests() -> None:
    late = record(2.0, sent=1.25)
    late.due = 1.0
    assert summarise([late, record(2.0)]).late_ms.max == 250.0


def test_nothing_measured_is_no_error() -> None:
    summary = summarise([])
    assert summary.requests == 0
    assert math.isnan(summary.output_tok_s)


def test_gaps_during_a_prefill_are_those_that_overlap_it() -> None:
    reading = [record(1.0, 2.0, 3.5, 4.0, 5.0)]
    arriving = [record(3.0, sent=2.5), record(sent=4.5)]  # the second one never got a token
    assert gaps_during_prefill(reading, arriving) == [1.5]
