"""Adapters in the scheduler: right answers, own prefixes, slots as a budget, loads and unloads."""

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.core.lora_slots import PATIENCE, LoRASlots
from tokenloom.wire.messages import (
    AbortReq,
    DrainReq,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    UnloadLoRAReq,
)

# Within a tenant a high priority comes first; it does not count where a slot is kept for another.
EQUAL_BEFORE_SLOTS: dict[str, object] = {"schedule_policy": "priority", "fairness": "vtc"}


def bench_with(count: int, **settings: object) -> Bench:
    bench = Bench(**settings)  # type: ignore[arg-type]
    for lora_id in range(1, count + 1):
        bench.load(lora_id)
    assert bench.lora_news == [LoRALoaded(n, ok=True) for n in range(1, count + 1)]
    return bench


def test_one_step_serves_the_base_model_and_several_adapters() -> None:
    bench = bench_with(3)
    for lora_id in (0, 1, 2, 3, 1, 0):
        bench.submit(prompt(10), lora_id=lora_id, ignore_eos=True)
    bench.step()
    bench.step()
    assert len(bench.running()) == 6
    bench.run()
    bench.assert_right()
    assert len({tuple(answer) for answer in bench.answers.values()}) == 4
    bench.assert_clean()


def test_requests_of_one_adapter_decode_side_by_side() -> None:
    bench = bench_with(2)
    for lora_id in (2, 0, 1, 2, 0, 1):
        bench.submit(prompt(10), lora_id=lora_id, ignore_eos=True)
    bench.step()
    bench.step()
    bench.launch()
    slots = bench.in_flight[0].batch.lora_slots
    assert slots == sorted(slots, key=slots.index)
    assert len(set(slots)) == 3
    bench.land()
    bench.run()
    bench.assert_right()


def test_a_prefix_is_of_use_under_its_own_adapter_alone() -> None:
    bench = bench_with(2)
    rids = []
    for lora_id in (0, 1, 2, 0, 1, 2):
        rids.append(bench.submit(prompt(20), lora_id=lora_id))
        bench.run()
    assert [bench.cached[rid] for rid in rids] == [0, 0, 0, 16, 16, 16]
    bench.assert_right()


def test_a_reloaded_name_meets_no_keys_of_the_old_weights() -> None:
    bench = bench_with(1)
    bench.submit(prompt(20), lora_id=1)
    bench.run()
    bench.send(LoadLoRAReq(LoRARef(2, "adapter 1", "/1")))
    bench.turn()
    bench.send(UnloadLoRAReq(1))
    rid = bench.submit(prompt(20), lora_id=2)
    bench.run()
    assert bench.cached[rid] == 0
    bench.assert_right()
    assert bench.lora_news[1:] == [LoRALoaded(2, ok=True), LoRAUnloaded(1)]


def test_more_adapters_than_slots_take_turns() -> None:
    bench = bench_with(6, max_loras=2)
    for number in range(24):
        bench.submit(prompt(6, number), 5, lora_id=number % 6 + 1, ignore_eos=True)
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_who_lacks_a_slot_lets_others_by() -> None:
    bench = bench_with(2, max_loras=1)
    first = bench.submit(prompt(6, 1), 30, lora_id=1, ignore_eos=True)
    bench.step()
    blocked = bench.submit(prompt(6, 2), 5, lora_id=2, ignore_eos=True)
    others = [
        bench.submit(prompt(6, 3), 5, ignore_eos=True),
        bench.submit(prompt(6, 4), 5, lora_id=1),
    ]
    bench.step()
    assert bench.running() == {first, *others}
    bench.run()
    assert bench.order[-1] == blocked
    bench.assert_right()


def test_a_starving_adapter_gets_its_turn() -> None:
    """Requests of a popular adapter never stop; another waits the stated number of steps."""
    bench = bench_with(2, max_loras=1, max_running=16)
    for number in range(3):
        bench.submit(prompt(4, number), 8 + number, lora_id=1, ignore_eos=True)
    bench.step()
    waits = bench.submit(prompt(4, 99), 3, lora_id=2, ignore_eos=True)
    for step in range(PATIENCE + 20):
        bench.submit(prompt(4, step + 5), 8, lora_id=1, ignore_eos=True)
        bench.step()
        if bench.answers.get(waits):
            break
    assert PATIENCE <= step <= PATIENCE + 12  # the answers that ran when it ended have 10 tokens
    bench.run()
    bench.assert_right()


def test_a_slot_stays_kept_when_its_next_owner_is_failed_by_the_pool() -> None:
    """Nobody else has another turn before it: its request tries again, or has failed too often."""
    faults = Faults()
    bench = bench_with(2, max_loras=1, **EQUAL_BEFORE_SLOTS, faults=faults)
    holds, waits = until_a_slot_is_kept(bench)
    rival = bench.submit(prompt(4, 3), 8, priority=1, lora_id=1)
    while holds not in bench.finishes:
        bench.step()
    faults.fail_allocation_every = 1
    for _ in range(2):
        bench.step()
        assert bench.running() == set()
    faults.fail_allocation_every = 0
    bench.run()
    assert bench.starts == [holds, waits, rival]
    bench.assert_right()


def test_the_next_owner_of_a_kept_slot_is_found_behind_any_number_of_others() -> None:
    bench = bench_with(2, max_loras=1, **EQUAL_BEFORE_SLOTS)
    holds, waits = until_a_slot_is_kept(bench)
    rivals = [bench.submit(prompt(4, 3), 1, priority=1, lora_id=1) for _ in range(300)]
    bench.run()
    assert bench.starts == [holds, waits, *rivals]


def until_a_slot_is_kept(bench: Bench) -> tuple[int, int]:
    """Who runs with the only slot, and who waits for it: it is kept for the latter's adapter."""
    holds = bench.submit(prompt(4, 1), PATIENCE + 5, lora_id=1, ignore_eos=True)
    bench.step()
    waits = bench.submit(prompt(4, 2), 8, lora_id=2)
    for _ in range(PATIENCE):
        bench.step()
    return holds, waits


def test_an_unload_waits_for_requests_that_wait_run_or_are_retracted() -> None:
    bench = bench_with(1, max_running=1)
    running = bench.submit(prompt(6, 1), 10, lora_id=1, ignore_eos=True)
    bench.step()
    waiting = bench.submit(prompt(6, 2), 10, lora_id=1, ignore_eos=True)
    bench.send(UnloadLoRAReq(1))
    late = bench.submit(prompt(6, 3), 10, lora_id=1)
    assert (bench.finishes[late].status, bench.finishes[late].reason) == (404, "error")
    bench.run()
    assert [bench.finishes[rid].reason for rid in (running, waiting)] == ["length", "length"]
    assert bench.lora_news[1:] == [LoRAUnloaded(1)]
    assert bench.runner.loras.present == set()
    bench.assert_right(running, waiting)
    bench.assert_clean()


def test_an_abort_ends_the_last_use() -> None:
    bench = bench_with(1)
    rid = bench.submit(prompt(6, 1), 10, lora_id=1, ignore_eos=True)
    bench.step()
    bench.send(UnloadLoRAReq(1))
    bench.abort(rid)
    bench.turn()
    assert bench.lora_news[1:] == [LoRAUnloaded(1)]
    assert bench.runner.loras.present == set()
    bench.run()
    bench.assert_clean()


@pytest.mark.parametrize("in_flight", [False, True])
def test_aborts_of_all_who_run_and_wait_are_answered(in_flight: bool) -> None:
    """ABT-05: ten of each; afterwards nobody uses the adapter."""
    bench = bench_with(1, max_running=10, chunk=128)
    rids = [bench.submit(prompt(6, n), 10, lora_id=1, ignore_eos=True) for n in range(20)]
    bench.step()
    assert len(bench.running()) == 10
    bench.send(UnloadLoRAReq(1))
    if in_flight:
        bench.step(meanwhile=[AbortReq(rid) for rid in rids])
    else:
        for rid in rids:
            bench.abort(rid)
    bench.turn()
    assert {bench.finishes[rid].reason for rid in rids} == {"abort"}
    assert bench.lora_news[1:] == [LoRAUnloaded(1)]
    bench.run()
    bench.assert_clean()


def test_retraction_keeps_the_adapter() -> None:
    bench = bench_with(3, pool_tokens=96, max_loras=2, ratio=0.1)
    for number in range(9):
        bench.submit(prompt(8, number), 40, lora_id=number % 3 + 1, ignore_eos=True)
    bench.run()
    assert bench.scheduler.totals.retractions > 0
    bench.assert_right()
    bench.assert_clean()


def test_a_failed_load_leaves_nothing() -> None:
    bench = Bench()
    bench.runner.loras.broken.add("/1")
    bench.load(1)
    assert bench.lora_news == [LoRALoaded(1, ok=False)]
    rid = bench.submit(prompt(5), lora_id=1)
    assert bench.finishes[rid].status == 404
    bench.assert_clean()


@pytest.mark.parametrize("message", [UnloadLoRAReq(9), LoadLoRAReq(LoRARef(1, "again", "/x"))])
def test_orders_that_make_no_sense_are_counted(message: LoadLoRAReq | UnloadLoRAReq) -> None:
    bench = bench_with(1)
    bench.send(message)
    bench.turn()
    assert bench.scheduler.totals.violations == 1
    assert len(bench.lora_news) == 1


def test_a_drain_answers_loads_before_the_end() -> None:
    bench = Bench()
    bench.send(LoadLoRAReq(LoRARef(1, "a", "/1")))
    bench.send(DrainReq())
    assert not bench.drained
    bench.turn()
    assert bench.drained
    assert bench.lora_news == [LoRALoaded(1, ok=True)]


def test_a_namespace_cannot_spell_an_adapter() -> None:
    """Clients name namespaces as they like, in `cache_salt`."""
    bench = bench_with(1)
    for lora_id, namespace in ((0, "1/"), (1, ""), (0, "1/x"), (1, "x"), (0, "")):
        rid = bench.submit(prompt(20), lora_id=lora_id, namespace=namespace)
        bench.run()
        assert bench.cached[rid] == 0
    bench.assert_right()


def test_starving_adapters_take_turns_by_the_length_of_their_wait() -> None:
    """Answers are longer than anyone's patience, and three adapters are always waited for."""
    bench = bench_with(4, max_loras=1, max_running=4)
    served: set[int] = set()
    waits = {}
    for number in range(12):
        for lora_id in range(1, 5):
            if lora_id not in waits or waits[lora_id] in bench.finishes:
                waits[lora_id] = bench.submit(
                    prompt(4, number), PATIENCE + 20, lora_id=lora_id, ignore_eos=True
                )
        running = set(bench.finishes)
        while set(bench.finishes) == running:
            bench.step()
        served |= {lora_id for lora_id, rid in waits.items() if rid in bench.finishes}
    assert served == {1, 2, 3, 4}


def test_a_crowd_before_the_one_whose_slot_is_kept_blocks_nobody() -> None:
    bench = bench_with(2, max_loras=1, **EQUAL_BEFORE_SLOTS)
    bench.submit(prompt(8, 1), PATIENCE + 10, lora_id=1, ignore_eos=True)
    bench.step()
    bench.submit(prompt(8, 2), 2, lora_id=2, ignore_eos=True)
    for _ in range(PATIENCE + 2):
        bench.step()
    for _ in range(300):
        bench.submit(prompt(4, 3), 1, lora_id=1, priority=1, ignore_eos=True)
    for _ in range(2000):
        bench.step()
    assert bench.scheduler.idle
    bench.assert_right()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "hrrn", "dfs-weight", "priority"])
@pytest.mark.parametrize("fairness", ["none", "vtc"])
def test_a_crowd_without_a_slot_holds_up_nobody(policy: str, fairness: str) -> None:
    """One slot is in use; hundreds wait for another adapter, each with a tenant of its own."""
    bench = bench_with(
        2, max_loras=1, pool_tokens=4096, schedule_policy=policy, fairness=fairness, chunk=64
    )
    holds = bench.submit(prompt(20), 100, lora_id=1, ignore_eos=True, tenant="holds")
    bench.step()
    for n in range(600):
        bench.submit(prompt(10, n + 2), 4, lora_id=2, tenant=str(n % 300))
    base = bench.submit(prompt(10, 999), 4, tenant="base")
    same = bench.submit(prompt(10, 998), 4, lora_id=1, tenant="same")
    asked: list[int] = []
    lacks_slot = LoRASlots.lacks_slot
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            LoRASlots,
            "lacks_slot",
            lambda self, lora_id, *more: asked.append(lora_id) or lacks_slot(self, lora_id, *more),
        )
        bench.step()
    assert set(bench.starts) == {holds, base, same}
    assert asked == [2], "one question for all of them"


def full_slots(threshold: int | None, loras: int = 1, **more: object) -> tuple[Bench, list[int]]:
    """Four requests of priority 0 that have all slots and rows."""
    bench = bench_with(
        3,
        max_loras=loras,
        max_running=4,
        schedule_policy="priority",
        preemption_threshold=threshold,
        **more,
    )
    rids = [
        bench.submit(prompt(8, n), 100, lora_id=1 + n % loras, ignore_eos=True) for n in range(4)
    ]
    for _ in range(2):
        bench.step()
    assert bench.running() == set(rids)
    return bench, rids


def test_an_urgent_request_preempts_all_users_of_one_slot() -> None:
    bench, rids = full_slots(1, loras=2)
    urgent = bench.submit(prompt(8, 9), 4, lora_id=3, priority=1, ignore_eos=True)
    bench.step()
    assert bench.running() == {urgent, rids[1], rids[3]}
    bench.run()
    assert bench.scheduler.totals.retractions == 2
    bench.assert_right()
    bench.assert_clean()


def test_the_slot_with_the_fewest_users_is_taken() -> None:
    bench = bench_with(3, max_loras=2, schedule_policy="priority", preemption_threshold=1)
    many = [bench.submit(prompt(8, n), 60, lora_id=1, ignore_eos=True) for n in range(3)]
    one = bench.submit(prompt(8, 5), 60, lora_id=2, ignore_eos=True)
    bench.step()
    bench.step()
    urgent = bench.submit(prompt(8, 9), 4, lora_id=3, priority=1, ignore_eos=True)
    bench.step()
    assert bench.running() == {*many, urgent}
    assert one not in bench.running()
    bench.run()
    bench.assert_right()


@pytest.mark.parametrize("blocks", ["priority", "protected"])
def test_nobody_gives_a_slot_up_where_one_of_its_users_stays(blocks: str) -> None:
    bench, rids = full_slots(2)
    stays = bench.scheduler._running[rids[2]]
    if blocks == "priority":
        stays.priority = 1
    else:
        stays.retractions = 2
    bench.submit(prompt(8, 9), 4, lora_id=2, priority=2, ignore_eos=True)
    bench.step()
    assert bench.running() == set(rids)
    assert bench.scheduler.totals.retractions == 0


def test_a_slot_and_room_are_taken_together_or_not_at_all() -> None:
    """The users of the slot do not hold enough pages, so others go as well."""
    options = {"pool_tokens": 256, "page_size": 4, "chunk": 0}
    bench = bench_with(
        2, max_loras=1, schedule_policy="priority", preemption_threshold=1, **options
    )
    base = bench.submit(prompt(120, 1), 60, ignore_eos=True)
    user = bench.submit(prompt(8, 2), 40, lora_id=1, ignore_eos=True)
    bench.step()
    assert bench.running() == {base, user}
    urgent = bench.submit(prompt(150, 3), 4, lora_id=2, priority=1, ignore_eos=True)
    bench.step()
    assert bench.running() == {urgent}
    bench.run()
    assert bench.scheduler.totals.retractions == 2
    bench.assert_right()


def test_no_two_adapters_take_turns_at_a_slot() -> None:
    bench, rids = full_slots(1)
    urgent = bench.submit(prompt(8, 9), 30, lora_id=2, priority=1, ignore_eos=True)
    while urgent not in bench.finishes:
        assert bench.step()
        assert not set(rids) & bench.running()
    bench.run()
    assert bench.scheduler.totals.retractions == len(rids)
    bench.assert_right()


@pytest.mark.parametrize("threshold", [None, 5])
def test_a_stream_of_low_priority_does_not_hold_a_slot_against_a_higher_one(
    threshold: int | None,
) -> None:
    """Nobody is preempted, but nobody lower joins the users of the slot either."""
    bench = bench_with(
        2, max_loras=1, schedule_policy="priority", preemption_threshold=threshold, max_running=4
    )
    holds = bench.submit(prompt(8), 30, lora_id=1, ignore_eos=True)
    bench.step()
    urgent = bench.submit(prompt(8, 2), 4, lora_id=2, priority=1, ignore_eos=True)
    bench.step()
    for n in range(40):
        bench.submit(prompt(8, n + 3), 30, lora_id=1, ignore_eos=True)
        bench.step()
    assert bench.starts[:2] == [holds, urgent]
    assert bench.scheduler.totals.retractions == 0
    bench.run()
    bench.assert_right()


def test_a_slot_that_is_kept_for_a_lower_one_is_the_higher_one_s_to_take() -> None:
    bench = bench_with(3, max_loras=1, schedule_policy="priority")
    holds, waits = until_a_slot_is_kept(bench)
    urgent = bench.submit(prompt(4, 3), 8, priority=1, lora_id=3, ignore_eos=True)
    bench.run()
    assert bench.starts == [holds, urgent, waits]
