"""Who gives way when the pool is full, one criterion at a time."""

from array import array

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core import retraction
from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req, ReqKV
from tokenloom.scheduler_proc.core.retraction import all_but_the_last
from tokenloom.wire.sampling import SamplingParams


def req(arrival: int, *, generated: int = 0, retractions: int = 0) -> Req:
    return Req(
        rid=arrival,
        arrival=arrival,
        sampling=SamplingParams(),
        ids=array("i", [1] * (4 + generated)),
        prompt_len=4,
        max_new_tokens=50,
        stop_ids=frozenset(),
        retractions=retractions,
    )


def test_the_least_generated_work_goes_first() -> None:
    least = req(2, generated=3)
    assert all_but_the_last([req(1, generated=9), least, req(3, generated=5)])[0] is least


def test_of_equal_work_the_newest_goes_first() -> None:
    newest = req(7, generated=3)
    assert all_but_the_last([req(1, generated=3), newest, req(4, generated=3)])[0] is newest


def test_the_protected_go_last() -> None:
    other = req(1, generated=40)
    assert all_but_the_last([req(2, retractions=2), other, req(3, retractions=9)])[0] is other
    once = req(5, retractions=1)
    assert all_but_the_last([req(1, generated=1), once])[0] is once
    newest = req(3, retractions=2)
    assert all_but_the_last([req(2, retractions=2), newest])[0] is newest


def test_one_order_serves_a_whole_step() -> None:
    """Who is first among those that are left is next in the order."""
    reqs = [req(n, generated=n * 7 % 5, retractions=n % 3) for n in range(1, 40)]
    order = all_but_the_last(reqs)
    assert len(order) == len(reqs) - 1
    for gone, first in enumerate(order):
        left = [one for one in reqs if one not in order[:gone]]
        assert all_but_the_last(left)[0] is first


def test_the_only_one_stays() -> None:
    assert all_but_the_last([req(1)]) == []
    assert all_but_the_last([]) == []


def test_many_retractions_in_one_step_cost_one_look_at_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All run out of pages at once, in a pool that has three pages left."""
    rows, looks = 64, {"rank": 0, "full": 0}
    rank, is_full = retraction._first_to_go, KVCache.is_full

    def counted_rank(req: Req) -> tuple[bool, int, int, int]:
        looks["rank"] += 1
        return rank(req)

    def counted_full(kv: KVCache, held: ReqKV) -> bool:
        looks["full"] += 1
        return is_full(kv, held)

    bench = Bench(
        pool_tokens=(rows + 3) * 4, max_running=rows, chunk=1024, ratio=1e-4, overlap=False
    )
    rids = [bench.submit(prompt(3, n), 8, ignore_eos=True) for n in range(rows)]
    bench.step()
    bench.step()
    assert bench.running() == set(rids)
    monkeypatch.setattr(retraction, "_first_to_go", counted_rank)
    monkeypatch.setattr(KVCache, "is_full", counted_full)
    bench.launch()
    assert bench.scheduler.totals.retractions == (rows - 3 + 1) // 2
    assert looks == {"rank": rows, "full": rows}
    bench.land()
    bench.run()
    bench.assert_right()
    bench.assert_clean()
