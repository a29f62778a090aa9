"""The scheduler case by case, on a hash model that turns every wrong KV page into a wrong token."""

import re
from array import array

import pytest
from support.hash_model import EOS, VOCAB
from support.scheduling import CONTEXT, Bench, prompt

from tokenloom.wire.messages import (
    AbortReq,
    DrainReq,
    FlushOut,
    FlushReq,
    StatsReq,
    StopMatched,
    TokenizedGenerateReq,
)
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import EvictionPolicy


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("reuse", [True, False])
def test_alone_in_a_crowd_cold_and_warm(page_size: int, chunk: int, reuse: bool) -> None:
    """SCH-16: with and without the prefix cache, with and without chunks, at their borders."""
    bench = Bench(pool_tokens=2048, page_size=page_size, chunk=chunk, reuse=reuse)
    for _ in range(2):
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 65, 200):
            bench.submit(prompt(length), 20, ignore_eos=True)
        bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_first_come_first_served() -> None:
    bench = Bench(max_running=1)
    rids = [bench.submit(prompt(5, seed), 3) for seed in range(6)]
    bench.run()
    assert bench.order == rids


def test_decodes_go_on_while_a_long_prompt_is_cut() -> None:
    """A long prompt never makes a running answer wait for more than its own step."""
    bench = Bench(pool_tokens=1024)
    short = bench.submit(prompt(5), 40, ignore_eos=True)
    bench.step()
    bench.submit(prompt(200, 2), 4)
    for _ in range(7):
        before = len(bench.answers[short])
        bench.step()
        assert len(bench.answers[short]) == before + 1
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize("length", [66, 120, 240])
def test_short_prompts_do_not_wait_for_how_long_another_is(length: int) -> None:
    """SCH-06: ten of them need two steps; every other step is theirs, the rest the long one's."""
    bench = Bench(pool_tokens=1024, max_running=16)
    long = bench.submit(prompt(length), 4)
    bench.step()
    short = [bench.submit(prompt(5, seed), 1) for seed in range(2, 12)]
    for _ in range(4):
        bench.step()
    assert all(bench.answers.get(rid) for rid in short)
    assert (length < 96) == (long in bench.answers)
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_a_long_prompt_gets_every_other_step_whatever_comes() -> None:
    bench = Bench(pool_tokens=1024, max_running=16)
    long = bench.submit(prompt(240), 4)
    steps = 0
    while long not in bench.answers:
        for seed in range(4):
            bench.submit(prompt(20, steps * 4 + seed + 2), 1)
        bench.step()
        steps += 1
    assert steps <= 2 * (240 // 32 + 1)
    assert len(bench.answers) >= steps // 2, "and others are served meanwhile"


def test_a_second_long_prompt_lets_few_short_ones_by() -> None:
    """The queue's bound counts here as well: what must be cut is a head that does not fit."""
    bench = Bench(pool_tokens=1024, max_running=32, max_skips=3)
    bench.submit(prompt(240), 4)
    bench.step()
    second = bench.submit(prompt(200, 2), 4)
    short = [bench.submit(prompt(5, seed), 1) for seed in range(3, 13)]
    bench.run()
    assert bench.starts == [1, *short[:3], second, *short[3:]]
    bench.assert_right()


def test_a_prompt_for_two_is_computed_once() -> None:
    """SCH-19: the second turn finds prompt and answer of the first, less the last token."""
    bench = Bench(page_size=1)
    first = bench.submit(prompt(100), 50, ignore_eos=True)
    bench.run()
    second = bench.submit(prompt(100) + bench.answers[first] + prompt(20, 3), 4)
    bench.run()
    assert bench.cached[second] == 149
    bench.assert_right()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_at_least_one_token_is_computed(page_size: int) -> None:
    bench = Bench(page_size=page_size)
    for _ in range(2):
        rid = bench.submit(prompt(48), 3)
        bench.run()
    assert bench.cached[rid] == 47 // page_size * page_size
    bench.assert_right()


def test_equal_prompts_in_one_step_end_up_on_the_same_pages() -> None:
    bench = Bench(pool_tokens=512, chunk=128)
    for _ in range(3):
        bench.submit(prompt(40), 30, ignore_eos=True)
    bench.step()
    stats = bench.scheduler.stats()
    assert stats.used_tokens == 40, "duplicates were not given back"
    bench.run()
    bench.assert_right()


def test_a_full_pool_retracts_and_nothing_is_lost() -> None:
    """SCH-01, SCH-08, SCH-10: more work than pool, and every answer as if it were alone."""
    bench = Bench(pool_tokens=512, ratio=0.01)
    rids = [bench.submit(prompt(20, seed), 100, ignore_eos=True) for seed in range(8)]
    bench.run()
    totals = bench.scheduler.totals
    assert 0 < totals.retractions <= 2 * len(rids), "retractions per request are bounded"
    assert all(0 <= bench.cached[rid] < 20 for rid in rids)
    bench.assert_right()
    bench.assert_clean()


def test_a_retracted_request_is_served_before_later_arrivals() -> None:
    bench = Bench(pool_tokens=128, ratio=0.01, max_running=4)
    for seed in range(3):
        bench.submit(prompt(20, seed), 60, ignore_eos=True)
    while not bench.scheduler.totals.retractions:
        assert bench.step()
    late = bench.submit(prompt(5, 9), 4)
    retracted = next(req for req in bench.scheduler._waiting if req.retractions)
    while late not in bench.answers:
        assert bench.step()
    assert retracted.holds_pages or retracted.rid in bench.finishes
    bench.run()
    bench.assert_right()


def test_one_request_that_never_fits_is_clipped_or_refused() -> None:
    """SCH-02, SCH-03, SCH-04: nothing waits for a pool that it can never have."""
    bench = Bench(pool_tokens=64)
    clipped = bench.submit(prompt(40), 100, ignore_eos=True)
    refused = bench.submit(prompt(64, 2), 5)
    served = [bench.submit(prompt(5, seed), 5) for seed in range(3, 13)]
    bench.run()
    assert len(bench.answers[clipped]) == 24
    assert bench.finishes[clipped].reason == "length"
    assert bench.finishes[refused].status == 400
    assert "64 tokens" in bench.finishes[refused].message
    assert all(bench.finishes[rid].status == 200 for rid in served)
    bench.assert_right()
    bench.assert_clean()


def test_no_limit_means_the_context() -> None:
    bench = Bench(pool_tokens=1024)
    rid = bench.submit(prompt(10), None, ignore_eos=True)
    bench.run()
    assert len(bench.answers[rid]) == CONTEXT - 10
    assert bench.finishes[rid].reason == "length"


def bad(rid: int, ids: bytes = b"\1\0\0\0", **sampling: object) -> TokenizedGenerateReq:
    return TokenizedGenerateReq(rid, ids, SamplingParams(**{"seed": 1, **sampling}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (bad(50, b""), "input_ids"),
        (bad(50, b"\1\0\0"), "input_ids"),
        (bad(50, array("i", [1, -1]).tobytes()), "-1 is outside 0..96"),
        (bad(50, array("i", [VOCAB]).tobytes()), "97 is outside 0..96"),
        (bad(50, array("i", [1] * CONTEXT).tobytes()), "context length is 256"),
        (bad(50, temperature=float("nan")), "temperature"),
        (bad(50, top_p=0.0), "top_p"),
        (bad(50, max_new_tokens=0), "max_new_tokens"),
        (bad(50, max_new_tokens=-3), "max_new_tokens"),
        (bad(50, logit_bias={3: 1e300}), "logit_bias"),
        (bad(50, logit_bias={VOCAB: 1.0}), "logit_bias"),
        (bad(50, stop=("",)), "stop"),
        (bad(50, stop_token_ids=(-1,)), "stop_token_ids"),
        (bad(50, seed=None), "seed"),
        (bad(50, seed=1 << 63), "seed"),
    ],
)
def test_the_second_wall(request_: TokenizedGenerateReq, names: str) -> None:
    """INP-05, SAM-24: a frame that passed the front's wall costs only its own request."""
    bench = Bench()
    good = bench.submit(prompt(10), 10)
    bench.send(request_)
    finish = bench.finishes[50]
    assert (finish.reason, finish.status) == ("error", 400)
    assert re.search(re.escape(names), finish.message)
    bench.run()
    bench.assert_right(good)
    bench.assert_clean()


def test_a_rid_in_use_is_not_taken_over() -> None:
    """ABT-10, ABT-11: the first goes on untouched, and no count suffers."""
    bench = Bench()
    rid = bench.submit(prompt(10), 10)
    bench.send(bench.requests[rid])
    bench.run()
    bench.assert_right()
    assert bench.scheduler.totals.violations == 1


@pytest.mark.parametrize("steps", range(13))
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_at_every_step(steps: int, in_flight: bool) -> None:
    """ABT, SCH-17: waiting, between chunks, decoding; before a step or while it runs."""
    bench = Bench(max_running=2)
    victim = bench.submit(prompt(200), 5, ignore_eos=True)
    mate = bench.submit(prompt(30, 2), 20, ignore_eos=True)
    for _ in range(steps):
        bench.step()
    if in_flight:
        bench.step(meanwhile=[AbortReq(victim), AbortReq(victim)])
    else:
        bench.abort(victim)
        bench.abort(victim)
    bench.run()
    again = bench.submit(prompt(200), 5, ignore_eos=True)
    bench.run()
    assert bench.finishes[victim].reason == ("abort" if steps < 12 else "length")
    bench.assert_right(victim, mate, again)
    bench.assert_clean()


def test_abort_of_unknown_and_finished_is_no_news() -> None:
    """SCH-25."""
    bench = Bench()
    rid = bench.submit(prompt(5), 2)
    bench.run()
    bench.abort(rid)
    bench.abort(999)
    bench.assert_clean()


def test_a_stop_string_ends_with_stop() -> None:
    bench = Bench()
    rid = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step()
    bench.step(meanwhile=[StopMatched(rid)])
    assert bench.finishes[rid].reason == "stop"
    bench.assert_clean()


def test_stop_tokens_and_end_of_text() -> None:
    bench = Bench(pool_tokens=2048, max_running=32)
    rids = [bench.submit(prompt(6, seed), 200) for seed in range(40)]
    bench.run()
    ended = [rid for rid in rids if bench.finishes[rid].matched == EOS]
    assert ended, "some answer should meet the end of text"
    answer = bench.answers[rids[1]]
    own = bench.submit(prompt(6), 200, ignore_eos=True, stop_token_ids=(answer[2],))
    bench.run()
    assert bench.answers[own] == answer[: answer.index(answer[2]) + 1]
    bench.assert_right()


def test_a_broken_row_ends_alone_and_its_pages_are_not_trusted() -> None:
    bench = Bench(chunk=64)
    rid, mate = bench.submit(prompt(30), 20), bench.submit(prompt(20, 2), 20)
    bench.runner.fail_rows = {0}
    bench.run()
    statuses = {bench.finishes[rid].status, bench.finishes[mate].status}
    assert statuses == {200, 500}
    broken = rid if bench.finishes[rid].status == 500 else mate
    again = bench.submit(prompt(30) if broken == rid else prompt(20, 2), 20)
    bench.run()
    assert bench.cached[again] == 0
    bench.assert_right()
    bench.assert_clean()


def test_drain_finishes_what_runs_and_refuses_what_waits() -> None:
    """I19."""
    bench = Bench(max_running=1)
    running = bench.submit(prompt(5), 5)
    bench.step()
    waiting = bench.submit(prompt(5, 2), 5)
    bench.send(DrainReq())
    late = bench.submit(prompt(5, 3), 5)
    too_long = bench.submit(prompt(CONTEXT + 9, 4), 5, ignore_eos=True)
    assert not bench.drained
    bench.run()
    assert bench.drained
    assert bench.scheduler.drained
    assert bench.finishes[running].status == 200
    assert {bench.finishes[rid].status for rid in (waiting, late, too_long)} == {503}
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_drain_ends_what_takes_too_long(overlap: bool) -> None:
    """Whatever it does: it runs, waits since it was retracted, or has a prompt in pieces."""
    bench = Bench(overlap=overlap, pool_tokens=1024)
    runs = bench.submit(prompt(5), 200, ignore_eos=True)
    retracted = bench.submit(prompt(5, 2), 200, ignore_eos=True)
    bench.step()
    bench.step()
    bench.submit(prompt(200, 3), 9)
    bench.step()
    while bench.in_flight:
        bench.land()
    bench.scheduler._retract(bench.scheduler._reqs[retracted])
    bench.send(DrainReq(timeout_s=20.0))
    bench.wait(19.9)
    assert not bench.finishes
    bench.wait(0.1)
    assert {finish.status for finish in bench.finishes.values()} == {503}
    assert len(bench.finishes) == 3
    assert "--drain-timeout" in (bench.finishes[runs].message or "")
    bench.run()
    assert bench.drained
    bench.assert_clean()


def test_drain_when_idle_is_done_at_once() -> None:
    bench = Bench()
    bench.send(DrainReq())
    assert bench.drained


def test_stats_add_up() -> None:
    bench = Bench(pool_tokens=512)
    bench.submit(prompt(50), 30, ignore_eos=True)
    for _ in range(4):
        bench.step()
        (stats,) = bench.scheduler.handle(StatsReq(3))
        assert stats.used_tokens + stats.free_tokens + stats.evictable_tokens == 512
        assert stats.running == 1
    bench.run()
    bench.audit()
    assert bench.scheduler.stats().generated_tokens_total == 30


def test_a_broken_law_is_counted_not_fatal() -> None:
    bench = Bench()
    bench.scheduler._kv.pages.alloc(1)
    reports: list[str] = []
    while bench.scheduler.on_idle(reports.append):
        pass
    assert "lost pages" in reports[0]
    assert bench.scheduler.totals.violations == 1


def test_the_token_budget_counts_decodes() -> None:
    bench = Bench(pool_tokens=2048, chunk=32, max_running=16)
    for seed in range(8):
        bench.submit(prompt(4, seed), 60, ignore_eos=True)
    bench.step()
    bench.submit(prompt(200, 20), 4)
    batch = bench.scheduler.get_next_batch_to_run()
    assert batch is not None
    assert sum(batch.extend_lens) <= 32
    bench.scheduler.process_batch_result(bench.runner.run(batch))
    bench.run()


def test_a_step_that_decodes_computes_less_of_a_prompt() -> None:
    """Running answers wait for a small piece at most; without them the whole chunk is taken."""
    bench = Bench(pool_tokens=2048, chunk=64, mixed_chunk=16)
    bench.submit(prompt(4), 60, ignore_eos=True)
    bench.step()
    bench.submit(prompt(100, 2), 4)
    batch = bench.scheduler.get_next_batch_to_run()
    assert batch is not None
    assert sum(batch.extend_lens) <= 16
    bench.scheduler.process_batch_result(bench.runner.run(batch))
    bench.abort(1)
    batch = bench.scheduler.get_next_batch_to_run()
    assert batch is not None
    assert sum(batch.extend_lens) == 64
    bench.scheduler.process_batch_result(bench.runner.run(batch))
    bench.run()
    bench.assert_right(2)


def test_namespaces_share_nothing() -> None:
    bench = Bench(pool_tokens=1024)
    first = bench.submit(prompt(40), 4, namespace="a")
    bench.run()
    foreign = [bench.submit(prompt(40), 4, namespace=name) for name in ("", "b", "aa")]
    own = bench.submit(prompt(40), 4, namespace="a")
    bench.run()
    assert [bench.cached[rid] for rid in foreign] == [0, 0, 0]
    assert bench.cached[own] == 36
    bench.assert_right(first, own, *foreign)
    bench.assert_clean()


def test_what_nobody_may_share_is_not_seen_by_eviction_either() -> None:
    """The pool is full of one namespace's pages; another's request evicts them, and reads none."""
    bench = Bench(pool_tokens=128)
    bench.submit(prompt(100), 20, namespace="a", ignore_eos=True)
    bench.run()
    other = bench.submit(prompt(100), 20, namespace="b", ignore_eos=True)
    bench.run()
    assert bench.cached[other] == 0
    bench.assert_right()
    bench.assert_clean()


def test_a_flush_when_idle_forgets_all() -> None:
    bench = Bench()
    bench.submit(prompt(40), 4)
    bench.run()
    pages = bench.scheduler.stats().tree_pages
    bench.send(FlushReq(7))
    assert bench.flushed == [FlushOut(7, True, pages=pages)]
    assert pages == 10
    stats = bench.scheduler.stats()
    assert (stats.tree_pages, stats.tree_nodes, stats.evictable_tokens) == (0, 0, 0)
    again = bench.submit(prompt(40), 4)
    bench.run()
    assert bench.cached[again] == 0
    bench.assert_right()
    bench.assert_clean()


def test_a_flush_is_refused_with_the_reason_while_requests_are_there() -> None:
    """SCH-20: before a step and while one is in flight; nobody loses a page."""
    bench = Bench(max_running=1)
    for seed in range(3):
        bench.submit(prompt(40, seed), 4)
    bench.send(FlushReq(6))
    bench.step()
    bench.step(meanwhile=[FlushReq(7)])
    why = "the server is not idle: {} requests run and {} wait"
    assert bench.flushed == [
        FlushOut(6, False, why.format(0, 3)),
        FlushOut(7, False, why.format(1, 2)),
    ]
    bench.run()
    assert bench.scheduler.stats().tree_pages > 0
    bench.assert_right()


def test_a_flush_waits_for_the_first_idle_moment() -> None:
    bench = Bench()
    bench.submit(prompt(40), 4)
    bench.step()
    bench.send(FlushReq(7, timeout_s=5.0))
    bench.send(FlushReq(8, timeout_s=1.0))
    bench.expire(0.9)
    late = bench.submit(prompt(40, 2), 30, ignore_eos=True)
    assert not bench.flushed
    bench.expire(1.0)
    assert [answer.seq for answer in bench.flushed] == [8]
    assert not bench.flushed[0].ok
    bench.run()
    assert bench.flushed[1:] == [FlushOut(7, True, pages=bench.flushed[1].pages)]
    assert len(bench.answers[late]) == 30, "requests are taken while a flush waits"
    assert bench.scheduler.stats().tree_pages == 0
    bench.expire(100.0)
    assert len(bench.flushed) == 2, "each is answered once"
    bench.assert_clean()


def test_an_abort_can_be_what_a_flush_waited_for() -> None:
    bench = Bench()
    rid = bench.submit(prompt(40), 100, ignore_eos=True)
    bench.step()
    bench.send(FlushReq(7, timeout_s=5.0))
    bench.abort(rid)
    assert bench.flushed[0].ok
    bench.assert_clean()


def test_a_drain_answers_flushes_before_its_last_word() -> None:
    bench = Bench()
    bench.submit(prompt(40), 4)
    bench.step()
    bench.send(FlushReq(7, timeout_s=5.0))
    bench.send(DrainReq())
    bench.run()
    assert bench.flushed[0].ok
    assert bench.drained


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "priority", "cost"])
def test_every_eviction_policy_serves_a_crowd(policy: EvictionPolicy) -> None:
    bench = Bench(pool_tokens=256, eviction=policy)
    for seed in range(30):
        bench.submit(prompt(20 + seed % 3 * 30, seed % 7), 10, namespace="ab"[seed % 2])
    bench.run()
    assert bench.scheduler.stats().evicted_pages_total > 0
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("priorities", [[1], [0, 1], [1, 0]])
def test_a_high_priority_keeps_its_prefix_under_that_policy(priorities: list[int]) -> None:
    """Whether it brought the prefix or found it."""
    bench = Bench(pool_tokens=256, eviction="priority")
    for priority in priorities:
        bench.submit(prompt(40), 4, priority=priority)
        bench.run()
    for seed in range(2, 12):
        bench.submit(prompt(40, seed), 4)
        bench.run()
    again = bench.submit(prompt(40), 4)
    bench.run()
    assert bench.cached[again] == 36
