"""Which prompts join a step, and in which order, where one of them is computed in pieces."""

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.faults import Faults


def cut_bench(length: int, **options: object) -> tuple[Bench, int]:
    """A prompt of which 32 tokens are computed; the next step is one in which others go first."""
    bench = Bench(pool_tokens=1024, chunk=32, prefix_group_tokens=0, **options)  # type: ignore[arg-type]
    long = bench.submit(prompt(length), 1)
    bench.step()
    return bench, long


def planned(bench: Bench) -> list[int]:
    """Tokens of each row of the next step, which is then computed."""
    batch = bench.scheduler.get_next_batch_to_run()
    assert batch is not None
    bench.scheduler.process_batch_result(bench.runner.run(batch))
    return list(batch.extend_lens)


def test_whole_ones_and_pieces_take_turns() -> None:
    bench, _ = cut_bench(200)
    for seed in range(2, 8):
        bench.submit(prompt(12, seed), 1)
    assert planned(bench) == [12, 12, 8], "two that need not be cut, then the piece"
    assert planned(bench) == [32], "the piece alone"
    assert planned(bench) == [12, 12, 8]


@pytest.mark.parametrize(("length", "tokens"), [(63, [31]), (64, [32]), (65, [30, 2])])
def test_a_piece_that_is_the_last_goes_first(length: int, tokens: list[int]) -> None:
    bench, _ = cut_bench(length, page_size=1)
    bench.submit(prompt(30, 2), 1)
    assert planned(bench)[: len(tokens)] == tokens


def test_the_last_piece_leaves_the_rest_of_the_step_to_others() -> None:
    bench, _ = cut_bench(40)
    bench.submit(prompt(60, 2), 1)
    assert planned(bench) == [8, 24]


def test_who_would_be_cut_is_passed_over() -> None:
    bench, _ = cut_bench(200)
    bench.submit(prompt(33, 2), 1)
    bench.submit(prompt(20, 3), 1)
    assert planned(bench) == [20, 12]
    assert bench.starts == [1, 3]


def test_whole_ones_may_take_the_whole_step() -> None:
    bench, long = cut_bench(200)
    for seed in range(2, 5):
        bench.submit(prompt(16, seed), 1)
    assert planned(bench) == [16, 16]
    assert planned(bench) == [32]
    assert planned(bench) == [16, 16], "the third, and a piece of the long one"
    assert bench.starts == [long, 2, 3, 4]


def test_a_cached_prefix_counts_for_whole() -> None:
    bench = Bench(pool_tokens=1024, chunk=32, prefix_group_tokens=0)
    bench.submit(prompt(60, 2), 1)
    bench.run()
    while bench.scheduler.stats().step % 2:
        bench.submit(prompt(3, 9), 1)
        bench.step()
    bench.submit(prompt(200), 1)
    bench.step()
    bench.submit(prompt(60, 2) + prompt(10, 5), 1)
    assert planned(bench) == [10, 20], "the piece ends at a page border"


def test_an_allocation_that_fails_beside_a_piece_costs_only_its_request() -> None:
    bench, long = cut_bench(200, faults=Faults())
    bench.submit(prompt(12, 2), 1)
    bench.faults.fail_allocation_every = 1
    bench.step()
    assert bench.scheduler.totals.violations == 1
    bench.faults.fail_allocation_every = 0
    bench.run()
    bench.assert_right(long, 2)


def test_urgent_ones_may_send_back_the_long_one_itself() -> None:
    """It is the lowest of those that run; the step goes on without it."""
    bench = Bench(
        pool_tokens=1024,
        chunk=32,
        max_running=1,
        preemption_threshold=1,
        schedule_policy="priority",
    )
    long = bench.submit(prompt(200), 1)
    bench.step()
    urgent = bench.submit(prompt(12, 2), 3, priority=1, ignore_eos=True)
    bench.step()
    assert bench.running() == {urgent}
    assert bench.scheduler._chunked is None
    bench.run()
    assert bench.starts == [long, urgent, long]
    bench.assert_right()
    bench.assert_clean()


def test_what_is_passed_over_reserves_nothing() -> None:
    """The small one fits beside what runs, not beside the second long one as well."""
    bench = Bench(pool_tokens=512, chunk=32, prefix_group_tokens=0)
    bench.submit(prompt(200), 1)
    bench.step()
    bench.submit(prompt(200, 2), 8)
    bench.submit(prompt(20, 3), 90)
    assert planned(bench) == [20, 12]


def test_nobody_starts_past_a_head_that_finds_no_tokens() -> None:
    """Two tokens are left, less than a page of the head's; the one behind it needs no more."""
    bench = Bench(pool_tokens=1024, chunk=32, prefix_group_tokens=0)
    bench.submit(prompt(50, 3), 1)
    bench.run()
    first = bench.submit(prompt(30), 1)
    head = bench.submit(prompt(40, 2), 1)
    cached = bench.submit(prompt(50, 3), 1)
    assert planned(bench) == [30]
    bench.run()
    assert bench.starts[1:] == [first, head, cached]


def test_one_token_is_enough_to_preempt_for() -> None:
    bench = Bench(pool_tokens=256, max_running=1, preemption_threshold=1)
    bench.submit(prompt(9, 3), 1)
    bench.run()
    bench.submit(prompt(8), 40, ignore_eos=True)
    bench.step()
    urgent = bench.submit(prompt(9, 3), 5, priority=1, ignore_eos=True)
    assert planned(bench) == [1]
    assert bench.running() == {urgent}
