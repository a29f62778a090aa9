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
