"""What tests make go wrong costs turns, never pages, answers or the loop."""

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.wire.messages import StatsOut, StatsReq


def crowd(bench: Bench, count: int = 6) -> None:
    for seed in range(count):
        bench.submit(prompt(20 + seed * 7, seed % 3), 30, ignore_eos=True)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_again_and_again(every: int, page_size: int) -> None:
    """SCH-24, SCH-10: at any length, also the only one that runs; twice, then it is left alone."""
    bench = Bench(page_size=page_size, pool_tokens=512, faults=Faults(retract_every=every))
    crowd(bench)
    bench.run()
    retractions = bench.scheduler.totals.retractions
    assert retractions == 12 if every < 3 else 3 < retractions <= 12
    assert all(bench.cached[rid] < 70 for rid in bench.requests)
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_prefixes_that_are_not_found(every: int) -> None:
    """What is computed again replaces nothing: duplicates are given back."""
    bench = Bench(pool_tokens=512, faults=Faults(miss_every=every))
    for _ in range(3):
        crowd(bench)
        bench.run()
        bench.assert_right()
        bench.assert_clean()
    assert (bench.scheduler.totals.cached_tokens == 0) == (every == 1)


@pytest.mark.parametrize("every", [2, 3, 5, 11, 50])
@pytest.mark.parametrize("chunk", [0, 32])
def test_an_allocation_that_fails_is_tried_again(every: int, chunk: int) -> None:
    """SCH-01, SCH-09: decode, first piece or later piece, others do not notice."""
    faults = Faults(fail_allocation_every=every)
    bench = Bench(pool_tokens=1024, chunk=chunk, faults=faults)
    crowd(bench)
    bench.submit(prompt(100, 9), 30, ignore_eos=True)
    bench.run()
    failed = faults.allocations // every
    assert bench.scheduler.totals.violations == failed > 0
    errors = [finish for finish in bench.finishes.values() if finish.reason == "error"]
    assert {finish.status for finish in errors} <= {500}
    assert len(errors) <= failed // 3
    if every >= 11:
        assert not errors, "few failures cost nobody the answer"
    bench.assert_right()
    bench.assert_clean()


def test_an_allocator_that_gives_nothing_ends_every_request_with_one_error() -> None:
    faults = Faults(fail_allocation_every=1)
    bench = Bench(pool_tokens=512, faults=faults)
    crowd(bench, 4)
    bench.run()
    assert set(bench.finishes) == set(bench.requests)
    assert {(finish.reason, finish.status) for finish in bench.finishes.values()} == {
        ("error", 500)
    }
    assert faults.allocations == 3 * 4
    bench.assert_clean()
    faults.fail_allocation_every = 0
    after = bench.submit(prompt(20), 10)
    bench.run()
    bench.assert_right(after)


def test_one_that_outgrows_a_pool_that_shrank_ends_with_an_error() -> None:
    """SCH-02: the last one that decodes gets no page; it ends, the next is served."""
    bench = Bench(pool_tokens=64, page_size=4)
    rid = bench.submit(prompt(8), 50, ignore_eos=True)
    bench.step()
    scheduler = bench.scheduler
    lost = scheduler._kv.pages.alloc(scheduler._kv.pages.available)
    while rid not in bench.finishes:
        batch = scheduler.get_next_batch_to_run()
        bench._note(
            scheduler.expire(0.0)
            if batch is None
            else scheduler.process_batch_result(bench.runner.run(batch))
        )
    assert bench.finishes[rid].status == 500
    assert "KV pool" in bench.finishes[rid].message
    scheduler._kv.pages.free(lost)
    after = bench.submit(prompt(8, 2), 5)
    bench.run()
    bench.assert_right(rid, after)
    bench.assert_clean()


def test_figures_come_after_the_ends_that_they_count() -> None:
    """A request that ends while a step is shaped is told of before the figures without it."""
    bench = Bench(pool_tokens=512, page_size=4, faults=Faults(fail_allocation_every=2))
    doomed = bench.submit(prompt(4), 50, ignore_eos=True)
    while doomed not in bench.finishes:
        batch = bench.scheduler.get_next_batch_to_run()
        *rows, stats = bench.scheduler.handle(StatsReq(1))
        bench._note(rows)
        assert isinstance(stats, StatsOut)
        assert stats.running + stats.waiting == (doomed not in bench.finishes)
        if batch is not None:
            bench._note(bench.scheduler.process_batch_result(bench.runner.run(batch)))
    assert bench.finishes[doomed].status == 500
    bench.assert_clean()


def test_nothing_goes_wrong_by_itself() -> None:
    faults = Faults()
    asked = [faults.retracts() or faults.misses() or faults.fails_allocation() for _ in range(99)]
    assert not any(asked)


def test_who_gets_no_page_gives_back_all_that_it_has() -> None:
    """And starts again: what failed for it may be what others hold."""
    bench = Bench(page_size=4)
    rid = bench.submit(prompt(4), 9, ignore_eos=True)
    bench.step()
    bench.faults.fail_allocation_every = 1
    bench.step()
    assert bench.scheduler.totals.retractions == 1
    assert bench.scheduler.stats().used_tokens == 0
    bench.faults.fail_allocation_every = 0
    bench.run()
    assert bench.starts == [rid, rid]
    bench.assert_right()


def test_a_forced_retraction_is_of_the_newest() -> None:
    bench = Bench(faults=Faults(retract_every=3))
    rids = [bench.submit(prompt(4, n), 9, ignore_eos=True) for n in range(4)]
    bench.step()
    bench.step()
    assert bench.running() == set(rids)
    bench.step()
    assert bench.scheduler.totals.retractions == 1
    assert bench.starts == [*rids, rids[-1]], "there is room for it to come back at once"


def test_each_comes_at_its_own_pace() -> None:
    faults = Faults(retract_every=2, miss_every=3, fail_allocation_every=4)
    assert [faults.retracts() for _ in range(4)] == [False, True, False, True]
    assert [faults.misses() for _ in range(6)] == [False, False, True, False, False, True]
    assert [faults.fails_allocation() for _ in range(5)] == [False, False, False, True, False]


def test_a_rid_whose_end_nobody_has_heard_of_is_in_use() -> None:
    """ABT-10: it ends while a step is planned, and comes again while that step is computed."""
    bench = Bench(page_size=16, chunk=64)
    bench.submit(prompt(17), 14, ignore_eos=True)
    victim = bench.submit(prompt(16, 2), 14, ignore_eos=True)
    bench.step()
    bench.faults.fail_allocation_every = 1
    times = 0
    while victim not in bench.finishes:
        assert bench.step(meanwhile=[bench.requests[victim]])
        times += 1
    assert bench.finishes[victim].status == 500
    assert bench.scheduler.totals.violations == 3 + times, "three failed allocations"
    bench.run()
    bench.assert_right(1)
    bench.assert_clean()
