"""A request starts beside others only if the pool has room for their answers too."""

import pytest
from support.scheduling import Bench

# 16 pages of 4 tokens; the running one holds 2 pages of prompt and is expected to take 7 or 8 more:
# 0.7 of the 40 tokens that it may add.


def running_one() -> Bench:
    bench = Bench(pool_tokens=64, max_running=4)
    bench.submit([9] * 8, 40, ignore_eos=True)
    bench.step()
    return bench


@pytest.mark.parametrize(("asks", "starts"), [(12, True), (40, False)])
def test_room_is_kept_for_those_that_decode(asks: int, starts: bool) -> None:
    bench = running_one()
    bench.submit([7] * 8, asks, ignore_eos=True)
    bench.step()
    assert bench.scheduler.stats().running == 1 + starts
    bench.run()
    bench.assert_right()


def test_room_is_kept_for_those_that_start_in_the_same_step() -> None:
    bench = Bench(pool_tokens=64, max_running=4, chunk=64)
    for first in (5, 6, 7):
        bench.submit([first] * 8, 30, ignore_eos=True)
    bench.step()
    assert bench.scheduler.stats().running == 1
    bench.run()
    bench.assert_right()


def test_cached_pages_count_as_room_unless_the_new_one_reads_them() -> None:
    bench = Bench(pool_tokens=64, max_running=4)
    bench.submit([9] * 40, 4, ignore_eos=True)
    bench.run()
    bench.submit([7] * 30, 30, ignore_eos=True)
    bench.step()
    assert bench.scheduler.stats().running == 1
    bench.run()
    bench.assert_right()


def test_a_prompt_of_just_the_budget_is_not_cut() -> None:
    bench = Bench(pool_tokens=256, chunk=30)
    bench.submit([9] * 30, 3, ignore_eos=True)
    assert bench.run() == 3
    bench.assert_right()


@pytest.mark.parametrize(("chunk", "page_size", "steps"), [(0, 4, 1), (1, 1, 70), (32, 4, 3)])
def test_a_prompt_longer_than_a_step_is_cut_if_prompts_are(
    chunk: int, page_size: int, steps: int
) -> None:
    bench = Bench(pool_tokens=256, chunk=chunk, page_size=page_size, max_prefill=32)
    bench.submit([9] * 70, 1, ignore_eos=True)
    assert bench.run() == steps
    bench.assert_right()


def test_uncut_prompts_share_a_step_up_to_just_the_budget() -> None:
    bench = Bench(pool_tokens=256, chunk=0, max_prefill=30)
    for first, length in ((3, 17), (4, 13), (5, 1)):
        bench.submit([first] * length, 9, ignore_eos=True)
    bench.step()
    assert bench.scheduler.stats().running == 2
    bench.run()
    bench.assert_right()


def test_steps_are_counted_and_those_without_a_retraction_make_admission_bolder() -> None:
    bench = Bench(pool_tokens=256)
    bench.submit([9] * 8, 40, ignore_eos=True)
    for _ in range(4):
        bench.step()
    stats = bench.scheduler.stats()
    assert stats.step == 4
    assert stats.new_token_ratio == pytest.approx(0.7 - 3 * 0.602 / 600)
    bench.run()
    assert bench.scheduler.stats().step == 40
