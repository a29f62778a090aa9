"""Adapters in the scheduler: right answers, own prefixes, slots as a budget, loads and unloads."""

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.core.lora_slots import PATIENCE
from tokenloom.wire.messages import (
    AbortReq,
    DrainReq,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    UnloadLoRAReq,
)


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
    bench = bench_with(2, max_loras=1, schedule_policy="priority", faults=faults)
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
    """A step looks at so many only; where nobody runs it looks at all, or nothing would move."""
    bench = bench_with(2, max_loras=1, schedule_policy="priority")
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
    """A pass looks at so many and no more: it may never come to the one that could start."""
    bench = bench_with(2, max_loras=1, schedule_policy="priority")
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
