"""Caps of the queue and limits of time: who is refused, who ends, and what they are told."""

import pytest
from support.hash_model import VOCAB
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.time_limit import TimeLimit
from tokenloom.wire.messages import AbortReq, DrainReq, LoRAUnloaded, UnloadLoRAReq


def test_a_full_queue_refuses_the_next_one() -> None:
    bench = Bench(max_running=1, max_waiting_requests=2)
    runs = bench.submit(prompt(5), 5)
    bench.step()
    wait = [bench.submit(prompt(5, n), 5) for n in (2, 3)]
    refused = bench.submit(prompt(5, 4), 5)
    finish = bench.finishes[refused]
    assert (finish.reason, finish.status) == ("error", 503)
    assert "--max-waiting-requests 2" in finish.message
    assert finish.retry_after is not None
    assert finish.retry_after > 0
    bench.run()
    bench.assert_right(runs, *wait)
    later = [bench.submit(prompt(5, n), 5) for n in (5, 6)]
    bench.run()
    bench.assert_right(*later)
    bench.assert_clean()


def test_a_queue_of_long_prompts_is_full_sooner() -> None:
    bench = Bench(max_running=1, max_waiting_tokens=60)
    bench.submit(prompt(5), 5)
    bench.step()
    bench.submit(prompt(40, 2), 5)
    refused = bench.submit(prompt(21, 3), 5)
    assert "--max-waiting-tokens 60" in bench.finishes[refused].message
    assert bench.finishes[refused].status == 503
    fits = bench.submit(prompt(20, 3), 5)
    assert fits not in bench.finishes
    bench.run()
    alone = bench.submit(prompt(100, 4), 5)
    bench.run()
    bench.assert_right(fits, alone)


@pytest.mark.parametrize("end", ["abort", "time", "drain"])
def test_who_leaves_the_queue_makes_room_in_it(end: str) -> None:
    """ABT-04: what only waits ends like any other, and is forgotten by every count."""
    bench = Bench(max_running=1, max_waiting_requests=1, max_waiting_tokens=10, queue_timeout=10.0)
    runs = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step()
    waits = bench.submit(prompt(10, 2), 5)
    if end == "abort":
        bench.abort(waits)
        bench.abort(waits)
    elif end == "time":
        bench.wait(10.0)
    else:
        bench.send(DrainReq())
    assert waits in bench.finishes
    limits = bench.scheduler._queue_limits
    assert (limits._requests, limits._tokens) == (0, 0)
    bench.run()
    bench.assert_right(runs)


def test_a_refused_request_leaves_no_trace() -> None:
    """SCH-21: neither a wrong one nor one too many counts, and it gets one row."""
    bench = Bench(max_running=1, max_waiting_requests=1, request_timeout=5.0)
    bench.submit(prompt(5), 5)
    bench.step()
    bench.submit(prompt(5, 2), 5)
    for n in range(100):
        bench.submit([VOCAB] if n % 2 else prompt(5, n), 5)
    assert {finish.status for finish in bench.finishes.values()} == {400, 503}
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert len(bench.scheduler._queue_limits._until_end._deadlines) == 2
    bench.run()
    bench.assert_right(1, 2)
    bench.assert_clean()


def test_a_retracted_request_neither_counts_nor_is_refused_nor_is_late() -> None:
    bench = Bench(
        pool_tokens=64,
        max_running=1,
        preemption_threshold=1,
        max_waiting_requests=1,
        queue_timeout=10.0,
    )
    low = bench.submit(prompt(8), 30, ignore_eos=True)
    bench.step()
    bench.submit(prompt(8, 2), 30, priority=1, ignore_eos=True)
    bench.step()
    assert low not in bench.running()
    next_one = bench.submit(prompt(8, 3), 5)
    assert next_one not in bench.finishes
    bench.wait(9.0)
    bench.run()
    bench.wait(100.0)
    bench.assert_right()
    assert {finish.status for finish in bench.finishes.values()} == {200}


def test_a_request_that_does_not_start_in_time() -> None:
    bench = Bench(max_running=1, queue_timeout=2.5)
    runs = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step()
    late = bench.submit(prompt(5, 2), 5)
    bench.wait(1.0)
    later = bench.submit(prompt(5, 3), 5)
    bench.wait(1.4)
    assert not bench.finishes
    bench.wait(0.1)
    finish = bench.finishes[late]
    assert (finish.reason, finish.status) == ("error", 503)
    assert "2.5 s (--queue-timeout)" in finish.message
    assert finish.retry_after
    bench.run()
    bench.wait(50.0)
    bench.assert_right(runs, later)


def test_whoever_has_started_is_in_time() -> None:
    bench = Bench(queue_timeout=2.5, request_timeout=60.0)
    rid = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step()
    bench.wait(2.5)
    assert rid not in bench.finishes
    bench.run()
    bench.assert_right()
    limits = bench.scheduler._queue_limits
    assert not limits._until_end._deadlines, "nothing is kept of who has ended"


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_a_request_that_does_not_end_in_time_keeps_what_it_has(steps: int) -> None:
    bench = Bench(pool_tokens=256, chunk=32, request_timeout=60.0)
    rid = bench.submit(prompt(80), 50, ignore_eos=True)
    for _ in range(steps):
        bench.step()
    bench.wait(59.9)
    assert rid not in bench.finishes
    bench.wait(0.1)
    finish = bench.finishes[rid]
    assert (finish.reason, finish.status) == ("error", 408)
    assert "60.0 s (--request-timeout)" in finish.message
    assert len(bench.answers[rid]) == max(0, steps - 2)
    bench.assert_right()
    bench.assert_clean()


def test_time_ends_a_retracted_request_too() -> None:
    bench = Bench(pool_tokens=64, max_running=1, preemption_threshold=1, request_timeout=5.0)
    low = bench.submit(prompt(8), 30, ignore_eos=True)
    bench.step()
    bench.step()
    bench.wait(1.0)
    high = bench.submit(prompt(8, 2), 30, priority=1, ignore_eos=True)
    bench.step()
    bench.wait(4.0)
    assert bench.finishes[low].status == 408
    assert len(bench.answers[low]) == 2
    bench.run()
    bench.assert_right(low, high)


def test_an_abort_that_comes_with_the_deadline_is_no_news() -> None:
    """SCH-25: whichever is first has the last word, in flight as well."""
    bench = Bench(request_timeout=5.0)
    rid = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step(meanwhile=[AbortReq(rid)])
    bench.wait(5.0)
    assert bench.finishes[rid].reason == "abort"
    other = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.wait(5.0)
    bench.abort(other)
    assert bench.finishes[other].status == 408
    bench.assert_clean()


def test_time_runs_out_while_a_step_is_in_flight() -> None:
    """It is told at once; the pages stay until the step has been read."""
    bench = Bench(request_timeout=5.0)
    rid = bench.submit(prompt(5), 50, ignore_eos=True)
    bench.step()
    assert bench.launch()
    bench.wait(5.0)
    assert bench.finishes[rid].status == 408
    assert bench.scheduler.stats().used_tokens == 8
    bench.land()
    bench.assert_clean()


def test_without_limits_nothing_expires() -> None:
    bench = Bench()
    rid = bench.submit(prompt(5), 5)
    bench.wait(1e9)
    bench.run()
    bench.assert_right(rid)


def test_deadlines_pass_in_order_and_only_once() -> None:
    limit = TimeLimit(10.0)
    for rid, now in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)):
        limit.begin(rid, now)
    limit.clear(2)
    limit.clear(99)
    assert limit.take_expired(9.99) == []
    assert limit.take_expired(11.0) == [1, 3]
    assert limit.take_expired(11.0) == []
    assert limit.take_expired(12.0) == [4]


def displaced(bench: Bench) -> list[int]:
    finishes = bench.finishes.items()
    return [rid for rid, finish in finishes if "higher priority" in finish.message]


def test_a_higher_priority_takes_the_place_of_the_lowest_and_latest() -> None:
    bench = Bench(max_running=1, max_waiting_requests=3, schedule_policy="priority")
    runs = bench.submit(prompt(5), 5)
    bench.step()
    wait = [bench.submit(prompt(5, n), 5, priority=n % 2) for n in (2, 3, 4)]
    equal = bench.submit(prompt(5, 5), 5)
    assert bench.finishes[equal].status == 503, "the newcomer, where none is lower"
    urgent = [bench.submit(prompt(5, 6 + n), 5, priority=1000) for n in range(3)]
    assert displaced(bench) == [wait[2], wait[0], wait[1]]
    assert {bench.finishes[rid].status for rid in wait} == {503}
    assert all(bench.finishes[rid].retry_after for rid in wait)
    late = bench.submit(prompt(5, 9), 5, priority=1000)
    assert bench.finishes[late].status == 503
    bench.run()
    bench.assert_right(runs, *urgent)
    assert bench.scheduler.stats().waiting == 0
    limits = bench.scheduler._queue_limits
    assert (limits._requests, limits._tokens, limits._waiting) == (0, 0, set())
    bench.assert_clean()


def test_smaller_priorities_displace_larger_ones_where_they_go_first() -> None:
    bench = Bench(max_running=1, max_waiting_requests=1, low_priority_first=True)
    bench.submit(prompt(5), 5)
    bench.step()
    first = bench.submit(prompt(5, 2), 5, priority=4)
    bench.submit(prompt(5, 3), 5, priority=-4)
    assert displaced(bench) == [first]


def test_as_many_are_displaced_as_a_longer_prompt_needs_and_none_in_vain() -> None:
    bench = Bench(max_running=1, max_waiting_tokens=60)
    bench.submit(prompt(5), 5)
    bench.step()
    low = [bench.submit(prompt(20, n), 5, priority=n) for n in (2, 0, 1)]
    for length, priority in ((41, 2), (61, 9), (30, 0)):
        bench.submit(prompt(length, 7), 5, priority=priority)
        assert displaced(bench) == []
    takes = bench.submit(prompt(40, 7), 5, priority=2)
    assert displaced(bench) == [low[1], low[2]]
    bench.run()
    bench.assert_right(low[0], takes)


def test_a_retracted_request_is_never_displaced() -> None:
    bench = Bench(
        pool_tokens=64,
        max_running=1,
        preemption_threshold=1,
        max_waiting_requests=1,
        schedule_policy="priority",
    )
    low = bench.submit(prompt(8), 20, ignore_eos=True)
    bench.step()
    bench.submit(prompt(8, 2), 20, priority=1, ignore_eos=True)
    bench.step()
    assert low not in bench.running()
    waits = bench.submit(prompt(8, 3), 5, priority=1)
    bench.submit(prompt(8, 4), 5, priority=2)
    assert displaced(bench) == [waits]
    bench.run()
    bench.assert_right()


def test_an_adapter_that_is_not_there_displaces_nobody() -> None:
    bench = Bench(max_running=1, max_waiting_requests=1)
    bench.submit(prompt(5), 5)
    bench.step()
    bench.submit(prompt(5, 2), 5)
    unknown = bench.submit(prompt(5, 3), 5, priority=5, lora_id=9)
    assert bench.finishes[unknown].status == 404
    assert displaced(bench) == []
    bench.load(1)
    bench.submit(prompt(5, 3), 5, lora_id=1)
    bench.send(UnloadLoRAReq(1))
    assert LoRAUnloaded(1) in bench.lora_news, "the refused one is not among those that use it"


@pytest.mark.parametrize("cap", ["max_waiting_requests", "max_waiting_tokens"])
def test_a_flood_in_the_queue_leaves_room_to_other_tenants(cap: str) -> None:
    bench = Bench(max_running=1, **{cap: 45})
    bench.submit([1], 5)
    bench.step()
    flood = [bench.submit([2], 2, tenant="flood") for _ in range(45)]
    refused = [rid for rid in flood if rid in bench.finishes]
    assert len(refused) == 5
    assert {bench.finishes[rid].status for rid in refused} == {503}
    assert "kept for others" in bench.finishes[refused[0]].message
    others = [bench.submit([3], 2, tenant=str(n)) for n in range(5)]
    assert not any(rid in bench.finishes for rid in others)
    late = bench.submit([3], 2, tenant="late")
    assert f"--{cap.replace('_', '-')} 45" in bench.finishes[late].message
    bench.run()
    bench.assert_right()
    limits = bench.scheduler._queue_limits
    assert limits._request_shares.total == limits._token_shares.total == 0


def test_who_outranks_somebody_is_not_held_to_a_share() -> None:
    bench = Bench(max_running=1, max_waiting_requests=9)
    bench.submit(prompt(5), 5)
    bench.step()
    waits = [bench.submit(prompt(5), 5, tenant="a", priority=n == 0) for n in range(8)]
    over = bench.submit(prompt(5), 5, tenant="a")
    assert over in bench.finishes
    urgent = bench.submit(prompt(5), 5, tenant="a", priority=2)
    assert not {urgent, *waits} & set(bench.finishes)
