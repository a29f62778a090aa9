"""The snapshot of statistics, number by number."""

from support.scheduling import Bench, prompt

from tokenloom.wire.messages import StatsOut


def test_a_snapshot_beside_one_that_runs_and_one_that_waits() -> None:
    """Of 16 pages of 4 tokens: 3 from an ended request, of which the running one reads 2."""
    bench = Bench(pool_tokens=64, max_running=1)
    bench.submit(prompt(9), 4, ignore_eos=True)
    bench.run()
    bench.submit([*prompt(9), *prompt(8, 2)], 4, ignore_eos=True)
    bench.submit(prompt(5, 3), 1)
    bench.step()
    assert bench.scheduler.stats(seq=7) == StatsOut(
        seq=7,
        step=5,
        running=1,
        waiting=1,
        used_tokens=5 * 4,  # 17, in whole pages
        evictable_tokens=4,
        free_tokens=10 * 4,
        free_rows=0,
        new_token_ratio=bench.scheduler._admission.ratio.value,
        retractions_total=0,
        prompt_tokens_total=9 + 17,
        cached_tokens_total=8,
        generated_tokens_total=4 + 1,
        violations_total=0,
        evicted_pages_total=0,
        tree_nodes=3,  # what both read, and what each has behind it
        tree_pages=1 + 4,
    )


def test_an_idle_scheduler_is_as_careful_as_a_new_one() -> None:
    bench = Bench()
    fresh = bench.scheduler.stats().new_token_ratio
    bench.submit(prompt(9), 20, ignore_eos=True)
    bench.run()
    assert bench.scheduler.stats().new_token_ratio < fresh
    bench.scheduler.on_idle(lambda message: None)
    assert bench.scheduler.stats().new_token_ratio == fresh
