"""Requests of higher priority take the place of lower ones: of few, and only if it helps."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.prefill_adder import PrefillAdder
from tokenloom.scheduler_proc.core.req import Req, ReqState
from tokenloom.scheduler_proc.core.retraction import all_but_the_last, preemptable_by
from tokenloom.wire.sampling import SamplingParams


def req(arrival: int, *, output: int = 0, priority: int = 0, retractions: int = 0) -> Req:
    one = Req(
        arrival, arrival, SamplingParams(), array("i", [1] * (3 + output)), 3, 50, frozenset()
    )
    one.state, one.priority, one.retractions = ReqState.DECODING, priority, retractions
    return one


def test_who_gives_way_first() -> None:
    in_order = [
        req(1, priority=-1, output=40),
        req(7, output=2),
        req(6, output=2),
        req(8, output=9),
        req(9, priority=3),
        req(10, priority=-5, retractions=2),
    ]
    assert all_but_the_last(in_order[::-1]) == in_order[:-1], "and never the only one"


def test_who_may_be_preempted() -> None:
    low, lower, equal, safe = req(1), req(2, priority=-1), req(3, priority=4), req(4, retractions=2)
    running = [low, lower, equal, safe]
    assert preemptable_by(req(5, priority=4), running, 4) == [lower, low]
    assert preemptable_by(req(5, priority=4), running, 5) == [lower]
    assert preemptable_by(req(5, priority=4), running, 6) == []


def full_bench(threshold: int | None = 1, **options: object) -> tuple[Bench, list[int]]:
    """Four requests that fill four rows and most of the pool, with priorities 0, 1, 2, 3."""
    bench = Bench(
        pool_tokens=256, max_running=4, chunk=64, preemption_threshold=threshold, **options
    )
    rids = [bench.submit(prompt(8, n), 56, priority=n, ignore_eos=True) for n in range(4)]
    bench.step()
    bench.step()
    assert bench.running() == set(rids)
    return bench, rids


def test_the_lowest_goes_for_a_row() -> None:
    bench, rids = full_bench()
    high = bench.submit(prompt(8, 9), 20, priority=2, ignore_eos=True)
    bench.step()
    assert bench.running() == {*rids[1:], high}
    assert bench.answers[high], "it starts in the step that made room for it"
    bench.run()
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize(("length", "gone"), [(40, 1), (120, 2), (180, 3)])
def test_as_few_go_as_are_needed(length: int, gone: int) -> None:
    bench, rids = full_bench()
    high = bench.submit(prompt(length, 9), 8, priority=9, ignore_eos=True)
    bench.step()
    assert bench.running() == {*rids[gone:], high}
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_none_goes_where_all_would_not_be_enough() -> None:
    bench, rids = full_bench()
    bench.submit(prompt(200, 9), 40, priority=3, ignore_eos=True)
    bench.step()
    assert bench.running() == set(rids)
    assert bench.scheduler.totals.retractions == 0
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize(("threshold", "priority"), [(None, 9), (5, 4), (1, 0)])
def test_none_goes_without_the_difference(threshold: int | None, priority: int) -> None:
    bench, rids = full_bench(threshold)
    bench.submit(prompt(8, 9), 20, priority=priority, ignore_eos=True)
    bench.step()
    assert bench.running() == set(rids)
    bench.run()
    bench.assert_right()


def test_what_fits_preempts_nobody() -> None:
    bench = Bench(pool_tokens=512, preemption_threshold=1)
    low = bench.submit(prompt(8), 30, ignore_eos=True)
    bench.step()
    high = bench.submit(prompt(8, 2), 30, priority=5, ignore_eos=True)
    bench.step()
    assert bench.running() == {low, high}


def test_only_the_head_asks_for_victims() -> None:
    """A step searches once, not for each request that it looks ahead to."""
    bench, rids = full_bench()
    head = bench.submit(prompt(8, 8), 20, ignore_eos=True)
    urgent = bench.submit(prompt(8, 9), 20, priority=9, ignore_eos=True)
    asked: list[int] = []
    victims_for = PrefillAdder.victims_for

    def asking(adder: PrefillAdder, req: Req, threshold: int) -> list[Req]:
        asked.append(req.rid)
        return victims_for(adder, req, threshold)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PrefillAdder, "victims_for", asking)
        bench.step()
    assert asked == [head], "one search a step"
    assert bench.running() == set(rids)
    bench.run()
    assert bench.order.index(head) < bench.order.index(urgent)
    bench.assert_right()
    bench.assert_clean()


def test_no_two_take_turns() -> None:
    """The one sent back waits until its victor has ended, although it came first."""
    bench = Bench(pool_tokens=64, max_running=1, preemption_threshold=1)
    low = bench.submit(prompt(8), 40, ignore_eos=True)
    bench.step()
    high = bench.submit(prompt(8, 2), 40, priority=1, ignore_eos=True)
    while high not in bench.finishes:
        assert bench.step()
        assert low not in bench.running()
    bench.run()
    assert bench.scheduler.totals.retractions == 1
    bench.assert_right()
    bench.assert_clean()


def test_twice_preempted_is_left_in_peace() -> None:
    bench = Bench(pool_tokens=64, max_running=1, preemption_threshold=1)
    low = bench.submit(prompt(8), 40, ignore_eos=True)
    for n in range(2, 5):
        while low not in bench.running():
            assert bench.step()
        bench.submit(prompt(8, n), 4, priority=1, ignore_eos=True)
        bench.step()
        assert (low in bench.running()) == (n == 4)
    bench.run()
    assert bench.scheduler.totals.retractions == 2
    bench.assert_right()


@pytest.mark.parametrize("at", [8, 9, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("page_size", [4, 16])
def test_preempted_at_every_border_of_a_page(at: int, page_size: int) -> None:
    """SCH-24, SCH-10: it goes on where it was; cached tokens stay those of its first start."""
    bench = Bench(pool_tokens=64, page_size=page_size, max_running=1, preemption_threshold=1)
    low = bench.submit(prompt(8), 40, ignore_eos=True)
    while 8 + len(bench.answers.get(low, [])) < at:
        assert bench.step()
    bench.submit(prompt(8, 2), 4, priority=1, ignore_eos=True)
    bench.run()
    assert bench.cached[low] == 0
    bench.assert_right()
    bench.assert_clean()


def test_equals_of_one_prompt_meet_again_after_a_preemption() -> None:
    """SCH-23: what comes back finds the pages of its twin, its own answer among them."""
    bench = Bench(pool_tokens=192, max_running=2, preemption_threshold=1)
    for _ in range(2):
        bench.submit(prompt(30), 60, ignore_eos=True)
    for _ in range(20):
        bench.step()
    bench.submit(prompt(30, 5), 20, priority=1, ignore_eos=True)
    bench.run()
    assert bench.scheduler.totals.retractions == 1
    bench.assert_right()
    bench.assert_clean()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_priorities(data: st.DataObject) -> None:
    """Everybody ends, right, after at most two retractions each."""
    bench = Bench(
        pool_tokens=data.draw(st.sampled_from([64, 128, 256])),
        page_size=data.draw(st.sampled_from([1, 4, 16])),
        max_running=data.draw(st.integers(1, 5)),
        chunk=data.draw(st.sampled_from([0, 16])),
        preemption_threshold=data.draw(st.integers(1, 3)),
    )
    for n in range(data.draw(st.integers(1, 10))):
        bench.submit(
            prompt(data.draw(st.integers(1, 50)), n % 4),
            data.draw(st.integers(1, 40)),
            priority=data.draw(st.integers(0, 4)),
        )
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step()
    bench.run()
    assert bench.scheduler.totals.retractions <= 2 * len(bench.requests)
    bench.assert_right()
    bench.assert_clean()
