"""Shares of tenants: the counters by themselves, and the bound of the VTC paper in a scheduler."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hash_model import VOCAB
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.fairness import MAX_IDLE, VirtualTokenCounters

WEIGHT = 2.0


def cold(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def serve(counters: VirtualTokenCounters, tenant: str, tokens: int) -> None:
    """A request that comes, starts and ends."""
    counters.enter(tenant)
    counters.join(tenant)
    counters.charge_prompt(tenant, tokens)
    counters.leave(tenant)
    counters.end(tenant)


def test_who_comes_back_is_lifted_to_the_least_of_those_who_wait() -> None:
    counters = VirtualTokenCounters(WEIGHT)
    for tenant, tokens in (("a", 100), ("b", 300)):
        counters.enter(tenant)
        counters.join(tenant)
        counters.charge_prompt(tenant, tokens)
    counters.enter("late")
    counters.join("late")
    assert counters["late"] == 100
    counters.charge_answer("late")
    assert counters["late"] == 102


def test_when_nobody_waits_the_last_who_did_counts() -> None:
    counters = VirtualTokenCounters(WEIGHT)
    counters.enter("a")
    counters.join("a")
    counters.charge_prompt("a", 50)
    counters.leave("a")
    counters.charge_answer("a")
    counters.enter("b")
    counters.join("b")
    assert counters["b"] == 52


def test_who_is_ahead_keeps_its_counter() -> None:
    counters = VirtualTokenCounters(WEIGHT)
    counters.enter("poor")
    counters.join("poor")
    serve(counters, "rich", 500)
    counters.enter("rich")
    counters.join("rich")
    assert counters["rich"] == 500


def test_who_is_back_is_not_forgotten() -> None:
    counters = VirtualTokenCounters(WEIGHT)
    counters.enter("waits")
    counters.join("waits")
    serve(counters, "back", 5)
    counters.enter("back")
    counters.join("back")
    counters.charge_prompt("waits", 50)
    serve(counters, "other", 1)
    assert counters["back"] == 5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=30))
def test_forgetting_changes_nothing(visits: list[tuple[str, int]]) -> None:
    """Against counters that are kept for ever: a tenant that was forgotten is lifted as far."""
    counters = VirtualTokenCounters(WEIGHT)
    counters.enter("waits")
    counters.join("waits")
    kept = {"waits": 0.0}
    for tenant, tokens in visits:
        if tokens % 3 == 0:
            counters.charge_prompt("waits", tokens)
            kept["waits"] += tokens
        counters.enter(tenant)
        counters.join(tenant)
        kept[tenant] = max(kept.get(tenant, 0.0), kept["waits"])
        assert counters[tenant] == kept[tenant]
        counters.charge_prompt(tenant, tokens)
        kept[tenant] += tokens
        counters.leave(tenant)
        counters.end(tenant)


def test_made_up_names_do_not_fill_the_memory() -> None:
    counters = VirtualTokenCounters(WEIGHT)
    for number in range(3 * MAX_IDLE):
        serve(counters, f"one after another {number}", 5)
    assert len(counters) == 0, "where nobody is, all are equal"
    counters.enter("waits")
    counters.join("waits")
    for number in range(3 * MAX_IDLE):
        serve(counters, f"beside one that waits {number}", 5)
    assert len(counters) <= MAX_IDLE + 1
    assert len(counters._idle) <= MAX_IDLE
    assert len(counters._heap) <= 100


def test_who_joins_a_changing_crowd_is_lifted_to_the_least_of_it() -> None:
    """Against a search through all; and what has been left behind by many visits stays small."""
    counters, draw = VirtualTokenCounters(WEIGHT), random.Random(1)
    kept: dict[str, float] = {}
    waiting: set[str] = set()
    level, most = 0.0, 0
    for _ in range(6000):
        tenant = f"tenant {draw.randrange(150)}"
        if tenant not in waiting:
            kept[tenant] = max(kept.get(tenant, 0.0), level)
            waiting.add(tenant)
            counters.enter(tenant)
            counters.join(tenant)
        elif draw.random() < 0.7:
            tokens = draw.randrange(100)
            kept[tenant] += tokens
            counters.charge_prompt(tenant, tokens)
        else:
            waiting.remove(tenant)
            counters.leave(tenant)
            counters.end(tenant)
        level = max(level, min((kept[one] for one in waiting), default=kept[tenant]))
        if tenant in waiting:
            assert counters[tenant] == kept[tenant]
        most = max(most, len(counters._heap) - 2 * len(waiting))
    assert 0 < most <= 64


class Shares:
    """A bench whose tenants always have requests waiting; and what each of them has been given."""

    def __init__(self, **options: object) -> None:
        self.bench = Bench(
            fairness="vtc",
            vtc_output_weight=WEIGHT,
            prefix_group_tokens=0,
            **options,  # type: ignore[arg-type]
        )
        self.tenant_of: dict[int, str] = {}
        self.number = 0

    def keep_waiting(self, tenant: str, count: int, prompt: int, answer: int) -> None:
        waiting = [req for req in self.bench.scheduler._waiting if req.tenant == tenant]
        for _ in range(count - len(waiting)):
            self.number += 1
            ids = cold(self.number, prompt)
            rid = self.bench.submit(ids, answer, tenant=tenant, ignore_eos=True)
            self.tenant_of[rid] = tenant

    def given(self, tenant: str) -> float:
        rids = [rid for rid, owner in self.tenant_of.items() if owner == tenant]
        started = [rid for rid in rids if rid in self.bench.starts]
        prompts = sum(len(self.bench.requests[rid].input_ids) // 4 for rid in started)
        return prompts + WEIGHT * sum(len(self.bench.answers.get(rid, ())) for rid in rids)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "hrrn"])
def test_service_of_tenants_that_always_wait_differs_by_no_more_than_the_bound(
    policy: str,
) -> None:
    """2 max(longest prompt, weight * tokens that the pool holds), whatever each of them sends."""
    pool, prompt = 256, 60
    shares = Shares(pool_tokens=pool, reuse=policy == "lpm", schedule_policy=policy)
    for _ in range(400):
        shares.keep_waiting("flood", 20, prompt, 4)
        shares.keep_waiting("polite", 12, 12, 16)
        shares.bench.step()
        difference = shares.given("flood") - shares.given("polite")
        assert abs(difference) <= 2 * max(prompt, WEIGHT * pool)
    assert min(shares.given("flood"), shares.given("polite")) > 5 * WEIGHT * pool
    shares.bench.run()
    shares.bench.assert_right()


def test_first_come_first_served_has_no_such_bound() -> None:
    """The flood gets what it asks for, so the test above can fail."""
    shares = Shares(pool_tokens=256, reuse=False)
    shares.bench.scheduler._waiting._counters = None
    shares.bench.scheduler._waiting._turns = None
    for _ in range(400):
        shares.keep_waiting("flood", 20, 60, 4)
        shares.keep_waiting("polite", 12, 12, 16)
        shares.bench.step()
    assert shares.given("flood") - shares.given("polite") > 2 * WEIGHT * 256


def test_a_polite_tenant_starts_before_the_backlog_of_a_flood() -> None:
    shares = Shares(max_running=2)
    shares.keep_waiting("flood", 50, 20, 6)
    for _ in range(5):
        shares.bench.step()
    shares.keep_waiting("polite", 1, 20, 6)
    started = len(shares.bench.starts)
    rid = max(shares.tenant_of)
    while rid not in shares.bench.starts:
        assert shares.bench.step()
    assert len(shares.bench.starts) - started <= 2


def test_a_retraction_charges_nobody_twice() -> None:
    bench = Bench(pool_tokens=512, ratio=0.01, fairness="vtc", reuse=False)
    counters = bench.scheduler._waiting._counters
    assert counters is not None
    charged: list[int] = []
    counters.charge_prompt = lambda tenant, tokens: charged.append(tokens)  # type: ignore[method-assign]
    for number in range(8):
        bench.submit(cold(number, 20), 100, tenant="ab"[number % 2], ignore_eos=True)
    bench.run()
    assert bench.scheduler.totals.retractions
    assert charged == [20] * 8
    assert not counters._requests
    bench.assert_right()


def test_cached_tokens_are_free() -> None:
    bench = Bench(fairness="vtc", page_size=4)
    counters = bench.scheduler._waiting._counters
    assert counters is not None
    charged: list[int] = []
    counters.charge_prompt = lambda tenant, tokens: charged.append(tokens)  # type: ignore[method-assign]
    for _ in range(2):
        bench.submit(cold(1, 41), 1, tenant="a")
        bench.run()
    assert charged == [41, 1]


def test_tenants_take_turns_within_a_step() -> None:
    bench = Bench(pool_tokens=1024, chunk=256, fairness="vtc")
    rids = [bench.submit(cold(n, 10), 5, tenant="ab"[n // 3]) for n in range(6)]
    bench.step()
    assert bench.starts == [rids[n] for n in (0, 3, 1, 4, 2, 5)]


def test_within_a_tenant_the_policy_decides() -> None:
    bench = Bench(max_running=1, fairness="vtc", schedule_policy="priority")
    bench.submit(cold(0, 8), 3, ignore_eos=True)
    bench.step()
    low = bench.submit(cold(1, 8), 1, tenant="a", priority=0)
    high = bench.submit(cold(2, 8), 1, tenant="a", priority=1)
    other = bench.submit(cold(3, 8), 1, tenant="b", priority=0)
    bench.run()
    assert bench.starts[1:].index(high) < bench.starts[1:].index(low)
    assert bench.starts[1:].index(other) < 2, "another tenant's priority does not count"
