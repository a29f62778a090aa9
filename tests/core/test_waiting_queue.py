"""Who goes next, in whole schedulers: policies, ageing, prefix groups, look-ahead."""

import random
from array import array

import pytest
from support.hash_model import VOCAB
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.lane import Waiter
from tokenloom.scheduler_proc.core.line import Gate, Line
from tokenloom.scheduler_proc.core.prefix_groups import PrefixLeaders
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.schedule_policy import order_factory
from tokenloom.scheduler_proc.core.waiting_queue import WaitingQueue
from tokenloom.wire.messages import AbortReq
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % (VOCAB - 1) + 1 for i in range(length)]


def cold(number: int, length: int = 16) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def queued(bench: Bench) -> Bench:
    """With one running that fills the only row for a while, so that the rest queues up."""
    bench.submit(cold(999, 8), 3, ignore_eos=True)
    bench.step()
    return bench


def test_lpm_takes_the_longest_cached_prefix_first() -> None:
    bench = Bench(max_running=1, schedule_policy="lpm")
    bench.submit(prompt(40), 1)
    bench.run()
    queued(bench)
    nothing = bench.submit(cold(1), 1)
    short = bench.submit(prompt(12) + cold(2), 1)
    long = bench.submit(prompt(32) + cold(3), 1)
    equal = bench.submit(prompt(32) + cold(4), 1)
    bench.run()
    assert bench.starts[-4:] == [long, equal, short, nothing]
    bench.assert_right()


def test_lpm_follows_the_cache_while_requests_wait() -> None:
    """What a running request computes makes a waiting one go first; no look at every step."""
    bench = Bench(max_running=1, schedule_policy="lpm", prefix_group_tokens=0)
    first = bench.submit(prompt(40), 5, ignore_eos=True)
    others = [bench.submit(cold(number), 1) for number in range(5)]
    follower = bench.submit(prompt(40) + cold(9), 1)
    bench.run()
    assert bench.starts == [first, follower, *others]


def test_dfs_weight_stays_in_a_subtree_until_it_is_done() -> None:
    bench = Bench(max_running=1, schedule_policy="dfs-weight", pool_tokens=1024)
    for seed in (1, 2):
        bench.submit(prompt(32, seed), 1)
    bench.run()
    queued(bench)
    rids = [bench.submit(prompt(32, 1 + number % 2) + cold(number), 1) for number in range(5)]
    last = bench.submit(prompt(32, 2) + cold(7), 1)
    bench.submit(prompt(32, 2) + cold(8), 1)
    bench.run()
    assert bench.starts[-7:] == [rids[1], rids[3], last, last + 1, rids[0], rids[2], rids[4]]


def test_hrrn_takes_short_ones_first_but_a_long_one_in_proportion_to_its_wait() -> None:
    bench = queued(Bench(max_running=1, schedule_policy="hrrn", max_overtakes=10**6))
    long = bench.submit(cold(0, 200), 1)
    short = 0
    while long not in bench.starts:
        while len(bench.scheduler._waiting) < 4:
            short += 1
            bench.submit(cold(short, 10), 1)
        assert bench.step()
        assert short < 200
    assert 10 < bench.starts.index(long) < 100


@pytest.mark.parametrize("flip", [False, True])
def test_priority_and_its_flip(flip: bool) -> None:
    bench = queued(Bench(max_running=1, schedule_policy="priority", low_priority_first=flip))
    rids = [bench.submit(cold(n), 1, priority=n % 3 - 1) for n in range(6)]
    bench.run()
    low, middle, high = (rids[n::3] for n in range(3))
    expected = low + middle + high if flip else high + middle + low
    assert bench.starts[1:] == expected


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
@pytest.mark.parametrize("bound", [0, 1, 5, 20])
def test_a_cold_request_starts_in_spite_of_an_endless_stream_of_hot_ones(
    policy: str, bound: int
) -> None:
    """SCH: cold requests starved under lpm. Here one is overtaken `max_overtakes` times at most."""
    bench = Bench(max_running=1, schedule_policy=policy, max_overtakes=bound, pool_tokens=1024)
    bench.submit(prompt(64), 1)
    bench.run()
    queued(bench)
    victim = bench.submit(cold(1, 200), 1)
    steps = hot = 0
    while victim not in bench.starts:
        while len(bench.scheduler._waiting) < 4:
            bench.submit(prompt(64) + cold(100 + hot, 4), 1)
            hot += 1
        bench.step()
        steps += 1
        assert steps < 200
    if policy == "hrrn":  # whose ratio lets the cold one go by itself some time
        assert len(bench.starts) - 3 <= bound
    else:
        assert len(bench.starts) - 3 == bound
    bench.run()
    bench.assert_right()


def line_of(count: int, max_overtakes: int) -> tuple[Line, list[Waiter]]:
    line = Line(order_factory("fcfs", 1), max_overtakes)
    waiters = [
        Waiter(Req(n, n, SamplingParams(), array("i", [1]), 1, 9, frozenset(), lora_id=n))
        for n in range(1, count + 1)
    ]
    for waiter in waiters:
        line.add(waiter, None)
    return line, waiters


@pytest.mark.parametrize(("lacking", "tried"), [((), 1), ((1, 3), 2), ((1, 2), 3), ((1, 2, 3), 3)])
def test_overdue_ones_without_a_slot_hold_nobody_up(lacking: tuple[int, ...], tried: int) -> None:
    """All three are overdue and none of them starts; the first that could is the last tried."""
    line, _ = line_of(3, max_overtakes=0)
    line.begin(1, 0)
    gate = Gate(lambda req: req.lora_id in lacking)
    found = []
    while (waiter := line.next(gate)) is not None:
        found.append(waiter.req.lora_id)
    assert found == [lora_id for lora_id in range(1, tried + 1) if lora_id not in lacking]


def test_one_that_starts_again_has_overtaken_once() -> None:
    """It was retracted: whoever waited since before it came has been let by no more than before."""
    line, (oldest, *others) = line_of(5, max_overtakes=3)
    for _ in range(3):
        for req in others[:2]:
            line.start(req)
            assert not line.is_overdue(oldest.req)
            line.add(req, None)
    line.start(others[2])
    assert line.is_overdue(oldest.req)
    assert not line.is_overdue(others[0].req)


def test_of_equal_prompts_one_leads_and_the_others_hit() -> None:
    bench = Bench(pool_tokens=1024, chunk=64, page_size=4, prefix_group_tokens=16)
    leader = bench.submit(prompt(40), 2, ignore_eos=True)
    followers = [bench.submit(prompt(40) + cold(n, 5), 2) for n in range(5)]
    other = bench.submit(cold(77, 8), 2)
    bench.step()
    assert bench.starts == [leader, other], "who shares nothing is not kept"
    bench.run()
    assert [bench.cached[rid] for rid in followers] == [40] * 5
    bench.assert_right()
    bench.assert_clean()


def test_without_groups_equal_prompts_are_computed_side_by_side() -> None:
    bench = Bench(pool_tokens=1024, chunk=128, page_size=4, prefix_group_tokens=0)
    rids = [bench.submit(prompt(40), 2) for _ in range(3)]
    bench.step()
    assert [bench.cached[rid] for rid in rids] == [0] * 3


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    bench = Bench(pool_tokens=1024, chunk=128, reuse=False, prefix_group_tokens=4)
    rids = [bench.submit(prompt(40), 2) for _ in range(3)]
    bench.step()
    assert bench.starts == rids


def test_followers_wait_for_as_much_as_they_share_of_a_long_prompt() -> None:
    bench = Bench(pool_tokens=1024, chunk=32, page_size=4, prefix_group_tokens=16)
    bench.submit(prompt(200), 2)
    far = bench.submit(prompt(120) + cold(1, 5), 2)
    near = bench.submit(prompt(60) + cold(2, 5), 2)
    bench.run()
    assert bench.cached[near] == 60
    assert bench.cached[far] == 120
    bench.assert_right()


def test_the_last_piece_of_a_cut_prompt_leads_too() -> None:
    bench = Bench(pool_tokens=1024, chunk=32, page_size=4, prefix_group_tokens=4)
    bench.submit(prompt(200), 2)
    follower = bench.submit(prompt(200) + cold(1, 5), 2)
    bench.run()
    assert bench.cached[follower] == 200


def test_an_overdue_request_waits_for_no_leader() -> None:
    """And one that becomes overdue while others start past it is not passed any more."""
    bench = Bench(
        pool_tokens=1024, chunk=128, max_running=16, max_overtakes=2, prefix_group_tokens=16
    )
    leader = bench.submit(prompt(40), 8, ignore_eos=True)
    follower = bench.submit(prompt(40) + cold(1, 5), 8, ignore_eos=True)
    others = [bench.submit(cold(n, 4), 8, ignore_eos=True) for n in range(2, 7)]
    bench.step()
    assert bench.starts == [leader, *others[:2]]
    bench.step()
    assert bench.starts == [leader, *others[:2], follower, *others[2:]]
    late = bench.submit(prompt(80, 2), 4)
    bench.submit(prompt(80, 2), 4)
    bench.scheduler._waiting._lines[""]._overtakers = [998, 999]  # as if two had passed
    while late not in bench.starts:
        bench.step()
    assert late + 1 in bench.starts, "both are overdue, so they start together"


@pytest.mark.parametrize("followers", [255, 256, 1000])
@pytest.mark.parametrize("fairness", ["none", "vtc"])
def test_any_number_of_followers_holds_up_nobody_else(followers: int, fairness: str) -> None:
    """Each has a tenant of its own, so that with fairness they are no single line either."""
    bench = Bench(
        pool_tokens=8192, chunk=64, page_size=4, prefix_group_tokens=16, fairness=fairness
    )
    leader = bench.submit(prompt(40), 2)
    for n in range(followers):
        bench.submit(prompt(40) + cold(n, 2), 1, tenant=str(n))
    other = bench.submit(cold(77, 8), 1, tenant="other")
    bench.step()
    assert bench.starts == [leader, other]


def test_a_pass_over_those_who_share_only_a_part_with_a_leader_is_bounded() -> None:
    """It holds up the rest of their group, and nobody beside it."""
    bench = Bench(pool_tokens=8192, chunk=32, page_size=4, prefix_group_tokens=16)
    leader = bench.submit(prompt(40) + cold(1, 80), 2)
    bench.step()
    for n in range(300):
        bench.submit(prompt(40) + cold(1, 80) + cold(n, 2), 1)
    same_group = bench.submit(prompt(40) + cold(2, 4), 1)
    other = bench.submit(cold(77, 8), 1)
    looks: list[int] = []
    held_from = PrefixLeaders.held_from
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            PrefixLeaders,
            "held_from",
            lambda self, req: looks.append(req.rid) or held_from(self, req),
        )
        bench.step()
    assert len(looks) <= 258
    assert bench.starts == [leader, other]
    while same_group not in bench.starts:
        assert bench.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("how", ["aborted", "aborted in flight", "broken"])
def test_nobody_waits_for_a_leader_that_has_gone(steps: int, how: str) -> None:
    bench = Bench(pool_tokens=1024, chunk=32, page_size=4, prefix_group_tokens=16)
    leader = bench.submit(prompt(100), 2)
    follower = bench.submit(prompt(100) + cold(1, 5), 2)
    for _ in range(steps):
        bench.step()
    if how == "broken":
        bench.runner.fail_rows = {0}
    bench.step(meanwhile=[AbortReq(leader)] if how == "aborted in flight" else [])
    if how == "aborted":
        bench.abort(leader)
    bench.run()
    bench.assert_right(follower)
    bench.assert_clean()


def test_a_group_that_waits_ends_with_its_leader_when_nothing_is_cached() -> None:
    """The prefix cannot be kept: the pool is too small for anything beside one request."""
    bench = Bench(pool_tokens=64, page_size=4, prefix_group_tokens=16)
    for n in range(6):
        bench.submit(prompt(40) + cold(n, 8), 12, ignore_eos=True)
    bench.run()
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("retractions", [0, 1, 2])
def test_nobody_goes_past_one_whose_answer_has_begun(retractions: int) -> None:
    settings = SchedulingConfig(page_size=4, prefix_group_tokens=0)
    queue = WaitingQueue(settings, KVCache(settings, 10))
    retracted, other = [waiter.req for waiter in line_of(2, max_overtakes=9)[1]]
    retracted.retractions = retractions
    for req in (retracted, other):
        queue.add(req)
    tried = list(queue.candidates(0, [], lambda req: False))  # neither fits
    assert tried == ([retracted] if retractions else [retracted, other])


def blocked(**options: object) -> tuple[Bench, int]:
    """One runs and holds half of the pool; the next one needs more than is left."""
    bench = Bench(pool_tokens=256, chunk=256, **options)  # type: ignore[arg-type]
    bench.submit(cold(1, 60), 60, ignore_eos=True)
    bench.step()
    head = bench.submit(cold(2, 150), 4)
    return bench, head


def test_small_ones_start_beside_a_head_that_does_not_fit_but_not_too_many() -> None:
    bench, head = blocked(max_skips=3)
    small = [bench.submit(cold(10 + n, 4), 2, ignore_eos=True) for n in range(10)]
    while head not in bench.starts:
        assert bench.step()
    assert bench.starts[:5] == [1, *small[:3], head]
    bench.run()
    bench.assert_right()


def test_without_skips_the_pool_is_held_at_once() -> None:
    bench, head = blocked(max_skips=0)
    bench.submit(cold(10, 4), 2)
    while head not in bench.starts:
        assert bench.step()
    assert bench.starts[:2] == [1, head]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_only_so_many_are_tried_behind_the_head(depth: int) -> None:
    bench, head = blocked(lookahead=depth)
    large = [bench.submit(cold(20 + n, 150), 4) for n in range(2)]
    small = bench.submit(cold(30, 4), 2)
    for _ in range(5):
        bench.step()
    assert (small in bench.starts) == (depth == 3)
    assert not {head, *large} & set(bench.starts)
    bench.run()
    bench.assert_right()


def test_what_a_head_has_let_by_is_counted_over_steps_and_heads() -> None:
    """Under a policy that changes its mind, the one that does not fit is not asked for more."""
    bench, head = blocked(max_skips=2, schedule_policy="priority")
    for n in range(6):
        bench.submit(cold(10 + n, 4), 2, ignore_eos=True)
        bench.step()
    other = bench.submit(cold(3, 150), 4, priority=1)
    bench.step()
    bench.abort(other)
    bench.submit(cold(40, 4), 2)
    while head not in bench.starts:
        assert bench.step()
    assert bench.starts[:4] == [1, 3, 4, head]
