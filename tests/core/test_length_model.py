"""The survival curve of answer lengths against its definition, computed the long way."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.scheduler_proc.core.length_model import (
    _MEMORY,
    BORDERS,
    LengthModel,
)

MOMENTS = [0, 1, 10, 16, 20, 100, 300, 5000]
ANSWERS = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40)


def learned(answers: list[tuple[int, bool]]) -> LengthModel:
    model = LengthModel(MOMENTS)
    for length, cut in answers:
        model.observe(length, cut=cut)
    return model


def survival(answers: list[tuple[int, bool]], length: int) -> float:
    """Kaplan and Meier: in each bucket, the share of those at risk that does not end in it."""
    weights = [(1 - 1 / _MEMORY) ** age for age in reversed(range(len(answers)))]
    alive = 1.0
    for left, right in pairwise(BORDERS):
        if left >= length:
            break
        risk = 1.0 + sum(w for w, (at, _) in zip(weights, answers, strict=True) if at > left)
        ends = sum(
            weight
            for weight, (at, cut) in zip(weights, answers, strict=True)
            if left < at <= right and not cut
        )
        behind = alive * (1 - ends / risk)
        if length <= right:
            return alive + (behind - alive) * (length - left) / (right - left)
        alive = behind
    return alive


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.integers(0, 300_000))
def test_an_outlook_is_the_survival_curve_seen_from_here(
    answers: list[tuple[int, bool]], generated: int
) -> None:
    start = max(border for border in BORDERS if border <= generated)
    now = survival(answers, start)
    outlook = learned(answers).outlook(LengthModel.age(generated))
    expected = [survival(answers, start + moment) / now for moment in MOMENTS]
    assert outlook == pytest.approx(expected)
    assert outlook[0] == 1.0
    assert outlook == sorted(outlook, reverse=True)
    assert outlook[-1] > 0.0


def test_borders_are_close_enough_for_any_length() -> None:
    assert all(left < right <= max(left + 1, left * 1.25) for left, right in pairwise(BORDERS))
    assert BORDERS[-1] > 131072, "as long as any context"


def chance(model: LengthModel, generated: int, more: int) -> float:
    """To live longer than so many more tokens."""
    return model.outlook(LengthModel.age(generated))[MOMENTS.index(more)]


def test_answers_that_were_only_cut_go_on_for_all_we_know() -> None:
    assert learned([(100, True)] * 50).outlook(0) == [1.0] * len(MOMENTS)


def test_a_cut_answer_speaks_of_what_it_lived_through_only() -> None:
    """Half are cut at 8 and half end at 16: that is no sign of answers ending at 8."""
    model = learned([(8, True), (16, False)] * 200)
    assert chance(model, 0, 10) == 1.0
    assert chance(model, 0, 20) < 0.01


def test_an_answer_that_has_outlived_the_short_ones_is_a_long_one() -> None:
    model = learned([(10, False), (1000, False)] * 200)
    assert chance(model, 0, 16) == pytest.approx(0.5, abs=0.05)
    assert chance(model, 40, 300) > 0.95


def test_old_answers_fade() -> None:
    model = learned([(10, False)] * 2000)
    assert chance(model, 0, 100) < 0.01
    for _ in range(2000):
        model.observe(500, cut=False)
    assert chance(model, 0, 100) > 0.95


def test_is_ready_after_enough_answers() -> None:
    model = LengthModel(MOMENTS)
    seen = 0
    while not model.ready:
        model.observe(3, cut=True)
        seen += 1
    assert seen == 34, "32 of which the first have faded a little"


def test_an_answer_longer_than_all_borders_counts_as_the_longest() -> None:
    last = len(BORDERS) - 1
    model = LengthModel([BORDERS[-1] - BORDERS[-2]])
    for _ in range(50):
        model.observe(BORDERS[-1] + 7, cut=False)
    assert model.outlook(last - 1)[0] < 0.05, "to live through the last bucket"
    assert model.outlook(last - 2) == [1.0], "and all that comes before it"
    assert model.outlook(last) == [1.0], "whoever has outlived that goes on for all we know"


def test_an_outlook_is_drawn_once_for_all_of_an_age() -> None:
    model = learned([(100, False)] * 50)
    assert model.outlook(3) is model.outlook(3)
    before = model.outlook(3)
    model.observe(1, cut=False)
    assert model.outlook(3) is not before
