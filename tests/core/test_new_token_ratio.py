"""The arithmetic of the decaying reserve."""

from array import array

import pytest

from tokenloom.scheduler_proc.core.new_token_ratio import NewTokenRatio
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.sampling import SamplingParams


def survivor(generated: int, allowed: int) -> Req:
    ids = array("i", [1] * (4 + generated))
    return Req(1, 1, SamplingParams(), ids, 4, allowed, frozenset())


def test_starts_careful_and_decays_to_a_floor_in_600_steps() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    ratio.decay()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    for _ in range(598):
        ratio.decay()
    assert ratio.value > 0.098
    for _ in range(9):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.reset()
    assert ratio.value == 0.7


def test_conservativeness_scales_start_and_floor_up_to_all() -> None:
    ratio = NewTokenRatio(2.0)
    assert ratio.value == 1.0
    for _ in range(700):
        ratio.decay()
    assert ratio.value == pytest.approx(0.14)
    assert NewTokenRatio(0.5).value == 0.35


def test_a_retraction_teaches_what_the_survivors_have_reached() -> None:
    ratio = NewTokenRatio(0.1)
    ratio.learn([survivor(10, 100), survivor(20, 99)])
    assert ratio.value == (10 + 20 + 20 + 20) / 200
    ratio.learn([survivor(0, 1000)])
    assert ratio.value == 70 / 200, "it never teaches to be less careful"
    ratio.learn([survivor(10, 5)])
    assert ratio.value == 1.0
