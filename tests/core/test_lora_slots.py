"""LoRASlots: the life of adapters, slots, starvation; and its laws under random use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.scheduler_proc.core.lora_slots import BASE, PATIENCE, AdapterError, LoRASlots
from tokenloom.wire.messages import LoRALoaded, LoRARef, LoRAUnloaded


def with_adapters(num_slots: int, count: int) -> LoRASlots:
    slots = LoRASlots(num_slots)
    for lora_id in range(1, count + 1):
        slots.begin_load(LoRARef(lora_id, f"a{lora_id}", "/x"))
        slots.end_load(LoRALoaded(lora_id, ok=True))
    return slots


def run(slots: LoRASlots, lora_id: int) -> None:
    slots.accept(lora_id)
    assert slots.may_run(lora_id)
    slots.admit(lora_id)


def end(slots: LoRASlots, lora_id: int) -> None:
    slots.retire(lora_id)
    slots.leave(lora_id)


def test_the_base_model_needs_no_slot() -> None:
    slots = LoRASlots(1)
    run(slots, BASE)
    assert slots.slot_of(BASE) == BASE
    end(slots, BASE)
    assert slots.take_writes() == []


def test_slots_go_to_whoever_comes_and_the_longest_unused_gives_way() -> None:
    slots = with_adapters(2, 3)
    run(slots, 1)
    run(slots, 2)
    assert slots.take_writes() == [(1, 1), (2, 2)]
    slots.accept(3)
    assert not slots.may_run(3)
    end(slots, 2)
    end(slots, 1)
    slots.admit(3)
    assert slots.take_writes() == [(2, 3)]
    run(slots, 1)  # still there: nothing is written
    assert slots.take_writes() == []
    assert (slots.slot_of(3), slots.slot_of(1)) == (2, 1)


def test_an_unloaded_adapter_serves_those_it_accepted() -> None:
    slots = with_adapters(1, 1)
    run(slots, 1)
    slots.accept(1)
    slots.unload(1)
    with pytest.raises(AdapterError, match="lora_id 1"):
        slots.accept(1)
    with pytest.raises(AdapterError, match="lora_id 1"):
        slots.unload(1)
    end(slots, 1)
    assert slots.take_orders().drops == []
    assert slots.may_run(1)  # the second one
    slots.admit(1)
    end(slots, 1)
    assert slots.take_orders().drops == [1]
    assert slots.take_writes() == [(1, BASE)]  # nobody took the first: it is out of date
    assert slots.adapters() == []


def test_what_is_not_loaded_is_refused() -> None:
    slots = LoRASlots(1)
    for lora_id in (7, -1):
        with pytest.raises(AdapterError):
            slots.accept(lora_id)
        with pytest.raises(AdapterError):
            slots.unload(lora_id)
    slots.begin_load(LoRARef(7, "a", "/x"))
    with pytest.raises(AdapterError, match="taken"):
        slots.begin_load(LoRARef(7, "b", "/y"))
    with pytest.raises(AdapterError, match="taken"):
        slots.begin_load(LoRARef(BASE, "b", "/y"))
    with pytest.raises(AdapterError):
        slots.accept(7)
    slots.end_load(LoRALoaded(7, ok=False, message="no file", status=404))
    assert slots.take_news() == [LoRALoaded(7, ok=False, message="no file", status=404)]
    with pytest.raises(AdapterError):
        slots.accept(7)
    assert slots.take_orders().drops == []


def test_is_loading_until_the_last_load_has_ended() -> None:
    slots = with_adapters(1, 1)
    assert not slots.loading
    for lora_id in (2, 3):
        slots.begin_load(LoRARef(lora_id, "a", "/x"))
    slots.end_load(LoRALoaded(2, ok=False))
    assert slots.loading
    slots.end_load(LoRALoaded(3, ok=True))
    assert not slots.loading


def test_unloaded_while_loading() -> None:
    slots = LoRASlots(1)
    slots.begin_load(LoRARef(1, "a", "/x"))
    slots.unload(1)
    assert slots.take_orders().drops == []
    slots.end_load(LoRALoaded(1, ok=True))
    assert slots.take_orders().drops == [1]
    assert slots.take_news() == [LoRALoaded(1, ok=True), LoRAUnloaded(1)]
    slots.begin_load(LoRARef(2, "a", "/x"))
    slots.unload(2)
    slots.end_load(LoRALoaded(2, ok=False))
    assert slots.take_orders().drops == []  # there never was anything to drop
    assert slots.take_news() == [LoRALoaded(2, ok=False), LoRAUnloaded(2)]


def test_a_starving_adapter_drains_the_least_used_one() -> None:
    slots = with_adapters(2, 3)
    for lora_id in (1, 1, 2):
        run(slots, lora_id)
    slots.accept(3)
    for _ in range(PATIENCE):
        assert slots.may_run(1)
        assert slots.may_run(2)
        assert slots.lacks_slot(3)
        slots.end_planning()
    assert slots.may_run(1)
    assert not slots.may_run(2)  # nobody joins it any more
    assert not slots.may_run(3)
    end(slots, 2)
    assert slots.may_run(3)
    slots.accept(2)
    assert not slots.may_run(2)  # the place is kept
    slots.admit(3)
    assert slots.slot_of(3) == 2
    end(slots, 3)
    assert slots.may_run(2)


def test_a_wish_dies_with_its_requests() -> None:
    slots = with_adapters(1, 2)
    run(slots, 1)
    slots.accept(2)
    for _ in range(PATIENCE):
        assert slots.lacks_slot(2)
        slots.end_planning()
    assert not slots.may_run(1)
    slots.leave(2)
    assert slots.may_run(1)
    slots.accept(2)
    for _ in range(PATIENCE):
        assert slots.may_run(1)  # it waits from the beginning again
        assert slots.lacks_slot(2)
        slots.end_planning()
    assert not slots.may_run(1)


def test_an_adapter_whose_slot_is_kept_for_another_asks_for_no_second_one() -> None:
    slots = with_adapters(2, 3)
    for lora_id in (1, 2, 2):
        run(slots, lora_id)
    slots.accept(1)
    slots.accept(3)
    for _ in range(3 * PATIENCE):
        slots.lacks_slot(1)
        assert slots.lacks_slot(3)
        slots.end_planning()
    assert not slots.may_run(1)
    assert slots.may_run(2)


def test_steps_without_a_shortage_try_nobody_s_patience() -> None:
    """As when no request could have started for want of pages."""
    slots = with_adapters(1, 2)
    run(slots, 1)
    slots.accept(2)
    assert slots.lacks_slot(2)
    for _ in range(2 * PATIENCE):
        slots.end_planning()
    assert slots.may_run(1)
    for _ in range(PATIENCE):
        assert slots.lacks_slot(2)
        slots.end_planning()
    assert not slots.may_run(1)


def test_an_empty_slot_is_taken_before_one_that_an_adapter_has() -> None:
    slots = with_adapters(2, 2)
    run(slots, 1)
    end(slots, 1)
    run(slots, 2)
    assert slots.take_writes() == [(1, 1), (2, 2)]


def short_steps(slots: LoRASlots, steps: int, *lora_ids: int) -> None:
    """Steps that have no slot for these; what else waits was not even looked at."""
    for _ in range(steps):
        for lora_id in lora_ids:
            assert slots.lacks_slot(lora_id)
        slots.end_planning()


def test_slots_are_kept_in_the_order_in_which_adapters_began_to_wait() -> None:
    """Also when the step that decides was full before it came to who waits for longest."""
    slots = with_adapters(1, 4)
    run(slots, 1)
    for lora_id in (2, 3, 4):
        slots.accept(lora_id)
    short_steps(slots, 1, 3)
    short_steps(slots, 1, 4, 2)  # of one step, in the order of the queue
    short_steps(slots, PATIENCE, 2)
    present, waiting = 1, [3, 4, 2]
    while waiting:
        slots.end_planning()
        end(slots, present)
        assert [lora_id for lora_id in sorted(waiting) if slots.may_run(lora_id)] == waiting[:1]
        present = waiting.pop(0)
        slots.admit(present)


def test_a_turn_is_long_enough_for_requests_that_do_not_fit_one_step() -> None:
    slots = with_adapters(1, 2)
    run(slots, 1)
    slots.accept(2)
    short_steps(slots, PATIENCE, 2)
    slots.accept(1)
    short_steps(slots, PATIENCE, 1)
    end(slots, 1)
    slots.admit(2)
    slots.accept(1)
    for _ in range(PATIENCE):
        run(slots, 2)
        short_steps(slots, 1, 1)
    assert not slots.may_run(2)
    for _ in range(PATIENCE + 1):
        assert not slots.may_run(1)
        end(slots, 2)
    assert slots.may_run(1)


def test_a_slot_that_is_free_sooner_than_the_one_kept_will_do() -> None:
    slots = with_adapters(2, 3)
    for lora_id in (1, 2, 2):
        run(slots, lora_id)
    slots.accept(3)
    short_steps(slots, PATIENCE, 3)
    assert not slots.may_run(1)  # it has the fewest users, so its slot is kept
    end(slots, 2)
    end(slots, 2)
    slots.admit(3)
    assert slots.slot_of(3) == 2
    assert slots.may_run(1)


def test_of_two_slots_the_one_is_kept_that_has_had_its_time() -> None:
    slots = with_adapters(2, 3)
    run(slots, 1)
    run(slots, 1)
    run(slots, 2)
    slots.accept(3)
    short_steps(slots, PATIENCE - 1, 3)
    end(slots, 2)
    run(slots, 2)  # still there: it has had it from the beginning
    slots.unload(2)
    end(slots, 2)
    slots.begin_load(LoRARef(4, "a4", "/x"))
    slots.end_load(LoRALoaded(4, ok=True))
    run(slots, 4)
    short_steps(slots, 1, 3)
    assert slots.may_run(4)
    assert not slots.may_run(1)  # although it has more users


def test_a_wish_ends_with_the_last_that_waits() -> None:
    """Others of the adapter run, but they wait for nothing."""
    slots = with_adapters(1, 3)
    run(slots, 1)
    slots.accept(2)
    short_steps(slots, PATIENCE, 2)
    slots.accept(1)
    short_steps(slots, 5, 1)
    slots.leave(1)
    slots.accept(1)
    end(slots, 1)
    slots.admit(2)
    slots.accept(3)
    short_steps(slots, 1, 3)
    short_steps(slots, PATIENCE, 3, 1)
    end(slots, 2)
    assert not slots.may_run(1)  # it began to wait after adapter 3
    assert slots.may_run(3)


class SlotsUnderUse(RuleBasedStateMachine):
    """Requests of many adapters, as a scheduler would drive them."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = LoRASlots(3)
        self.slots.patience = 2
        self.next_id = 1
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.in_slot: dict[int, int] = {}  # what the runner would have

    @rule()
    def load(self) -> None:
        self.slots.begin_load(LoRARef(self.next_id, "a", "/x"))
        self.slots.end_load(LoRALoaded(self.next_id, ok=self.next_id % 5 != 0))
        self.next_id += 1

    @rule(lora_id=st.integers(0, 12))
    def accept(self, lora_id: int) -> None:
        known = {a.ref.lora_id for a in self.slots.adapters() if a.loaded and not a.draining}
        if lora_id in known or lora_id == BASE:
            self.slots.accept(lora_id)
            self.waiting.append(lora_id)
        else:
            with pytest.raises(AdapterError):
                self.slots.accept(lora_id)

    @rule(lora_id=st.integers(0, 12))
    def unload(self, lora_id: int) -> None:
        known = {a.ref.lora_id for a in self.slots.adapters() if not a.draining}
        if lora_id in known:
            self.slots.unload(lora_id)

    @precondition(lambda self: self.waiting)
    @rule()
    def step(self) -> None:
        for lora_id in list(self.waiting):
            if not self.slots.lacks_slot(lora_id):
                self.slots.admit(lora_id)
                self.waiting.remove(lora_id)
                self.running.append(lora_id)
        self.slots.end_planning()
        self.check_wishes()

    def check_wishes(self) -> None:
        """Whoever has lacked a slot for too long is next, or all slots go to others like it."""
        slots, kept = self.slots, self.slots._kept
        there = {adapter.slot for adapter in slots.adapters() if adapter.slot is not None}
        for adapter in slots.adapters():
            since = slots._wishes.get(adapter.ref.lora_id, slots.shortages)
            if adapter.slot is None and slots.shortages - since >= slots.patience:
                assert adapter in kept.values() or there <= set(kept)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), retract=st.booleans())
    def stop(self, index: int, retract: bool) -> None:
        lora_id = self.running.pop(index % len(self.running))
        self.slots.retire(lora_id)
        if retract:
            self.waiting.append(lora_id)
        else:
            self.slots.leave(lora_id)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        self.slots.leave(self.waiting.pop(index % len(self.waiting)))

    @invariant()
    def a_used_slot_keeps_its_adapter(self) -> None:
        used = {lora_id: self.slots.slot_of(lora_id) for lora_id in self.running}
        for slot, lora_id in self.slots.take_writes():
            for runner, its in used.items():
                assert its != slot or runner == lora_id or self.in_slot.get(slot) != runner
            self.in_slot[slot] = lora_id
        for lora_id, slot in used.items():
            assert lora_id == BASE or self.in_slot[slot] == lora_id
        assert len({slot for slot in used.values() if slot}) == len(set(used) - {BASE})

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        for adapter in self.slots.adapters():
            lora_id = adapter.ref.lora_id
            assert adapter.running == self.running.count(lora_id)
            assert adapter.requests == adapter.running + self.waiting.count(lora_id)
            assert lora_id not in self.slots._wishes or lora_id in self.waiting
        known = {adapter.ref.lora_id for adapter in self.slots.adapters()}
        assert set(self.running + self.waiting) <= known | {BASE}
        for lora_id in self.slots.take_orders().drops:
            assert lora_id not in self.running + self.waiting
            assert lora_id not in self.in_slot.values()

    def teardown(self) -> None:
        """Nobody starves: all that wait come to run, when those that run end in time."""
        for _ in range(200 * (self.slots.patience + 2)):
            if not self.waiting:
                break
            self.step()
            if self.running:
                self.stop(0, retract=False)
        assert not self.waiting


SlotsUnderUse.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSlotsUnderUse = SlotsUnderUse.TestCase
