"""Bugs that other engines have had, replayed on the core; docs/testing.md says where others are.

Their ids stand in the docstrings of whatever test is theirs.
"""

from random import Random

import pytest
from support.scheduling import Bench, prompt

from tokenloom.wire.messages import AbortReq, StopMatched


def test_a_hungry_head_lets_few_by_and_starts_when_the_pool_allows() -> None:
    """SCH-05: 200 of 320 slots are taken for 40 more steps; both bounds are counted."""
    bench = Bench(pool_tokens=320, chunk=256, max_running=40, max_skips=6)
    running = bench.submit(prompt(160), 40, ignore_eos=True)
    bench.step()
    head = bench.submit(prompt(200, 2), 40, ignore_eos=True)
    small = [bench.submit(prompt(5, seed), 5, ignore_eos=True) for seed in range(3, 33)]
    steps = 0
    while head not in bench.starts:
        assert bench.step()
        steps += 1
    assert bench.starts[:8] == [running, *small[:6], head]
    assert steps == 40, "the step after the one that ends the running answer"
    bench.run()
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("between", [False, True])
def test_mixed_steps_of_large_pages_with_aborts(between: bool) -> None:
    """SCH-11: lengths around pages of 16, every second one aborted, some between two chunks."""
    bench = Bench(pool_tokens=512, page_size=16, chunk=32, mixed_chunk=24)
    rids = [
        bench.submit(prompt(length, seed), 20, ignore_eos=True)
        for seed, length in enumerate((15, 16, 17, 31, 33, 65, 66, 64))
    ]
    chunked = 0
    for rid in rids[1::2]:
        bench.step()
        chunked += bench.scheduler._chunked is not None
        if between and bench.scheduler._chunked is not None:
            rid = bench.scheduler._chunked.rid
        bench.abort(rid)
        stats = bench.scheduler.stats()
        assert stats.free_tokens + stats.evictable_tokens + stats.used_tokens == 512
    assert chunked, "no prompt was between two chunks"
    bench.run()
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance_after_a_crowd(seed: int) -> None:
    """SCH-12: lengths and reasons of the end at random; idle again, nothing is missing."""
    rng = Random(seed)
    bench = Bench(pool_tokens=128, ratio=0.01, mixed_chunk=16)
    for n in range(150):
        rid = bench.submit(prompt(rng.randint(1, 90), rng.randrange(6)), rng.randint(1, 40))
        late = rng.choice((AbortReq(rid), StopMatched(rid), None, None))
        for _ in range(rng.randint(0, 2)):
            bench.step()
        if late is not None:
            bench.step(meanwhile=[late])
        if n % 50 == 49:
            bench.run()
            bench.audit()
            bench.assert_clean()
    assert bench.scheduler.totals.retractions
    assert {finish.reason for finish in bench.finishes.values()} == {"stop", "length", "abort"}
    bench.assert_right()


@pytest.mark.parametrize("reuse", [True, False])
def test_stop_strings_at_any_position_lose_no_page(reuse: bool) -> None:
    """SCH-13: a stop string is found one step late, at each position of the answer."""
    bench = Bench(pool_tokens=128, reuse=reuse)
    for n in range(100):
        rid = bench.submit(prompt(10, n), 10, ignore_eos=True)
        for _ in range(1 + n % 9):
            bench.step()
        bench.step(meanwhile=[StopMatched(rid)])
        assert bench.finishes[rid].reason == "stop"
        stats = bench.scheduler.stats()
        assert stats.free_tokens + stats.evictable_tokens == 128
        assert reuse or stats.free_tokens == 128
    bench.assert_right()
    bench.assert_clean()


def test_a_shared_part_of_a_page_is_nobodys_twice() -> None:
    """SCH-14: six common tokens are one common page of four."""
    bench = Bench(page_size=4)
    common = prompt(6)
    for seed in (2, 3):
        bench.submit(common + prompt(10, seed), 1)
        bench.run()
    tree = bench.scheduler._kv.tree
    pages: list[int] = []
    todo = [tree.root]
    while todo:
        node = todo.pop()
        pages += node.pages
        todo += node.children.values()
    assert len(pages) == len(set(pages)) == tree.evictable_pages == 4 + 3
    bench.assert_right()


def test_what_was_evicted_is_not_found_again() -> None:
    """SCH-22: the pages of A hold B when A comes again."""
    bench = Bench(pool_tokens=32, page_size=4)
    for seed in (1, 2, 1, 2):
        rid = bench.submit(prompt(24, seed), 8, ignore_eos=True)
        bench.run()
        assert bench.cached[rid] == 0
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("seed", range(40))
def test_who_stays_keeps_the_right_row_when_others_leave(seed: int) -> None:
    """ABT-13: four of eight leave at any step, others take their rows in the same step."""
    rng = Random(seed)
    bench = Bench(pool_tokens=1024)
    first = [bench.submit(prompt(12, n), 20, ignore_eos=True) for n in range(8)]
    gone = rng.sample(first, 4)
    for n, rid in enumerate(gone):
        for _ in range(rng.randint(0, 5)):
            bench.step()
        bench.step(meanwhile=[AbortReq(rid)]) if rng.random() < 0.5 else bench.abort(rid)
        bench.submit(prompt(9, 20 + n), 20, ignore_eos=True)
    bench.run()
    assert {rid for rid, finish in bench.finishes.items() if finish.reason == "abort"} <= {*gone}
    bench.assert_right()
    bench.assert_clean()
