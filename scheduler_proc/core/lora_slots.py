"""LoRASlots: which adapters are loaded, which hold a slot, and which requests use them.

A step reads at most `num_slots` adapters beside the base model; a slot is written only while no
running request uses it. An adapter that has lacked a slot for PATIENCE short steps gets one
reserved (kept): once the adapter in it has had its time, no more of its requests start, and when
the running ones have ended the slot changes hands. Slots are kept in the order in which adapters
began to wait, so each other adapter has at most one turn before. Where priorities count, a slot is
kept at once for a higher priority, which also takes slots kept for lower ones. Owned by
core/scheduler.py; the runner follows through `take_orders` and `take_writes`. PURE.

    ABSENT -> LOADING -> HOST -> RESIDENT -> HOST     RESIDENT: has a slot
    HOST, RESIDENT -> DRAINING -> ABSENT              unloaded: accepted requests finish first
    LOADING -> ABSENT                                 the load failed
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from ...wire.messages import LoadLoRAReq, LoRALoaded, LoRARef, LoRAUnloaded, UnloadLoRAReq
from ..worker_batch import LoRAOrders

BASE = 0  # lora_id and slot of the base model
# Short steps (steps in which an adapter lacks a slot) until one is kept for the adapter, and for
# which its turn then lasts at least: otherwise a turn would serve only requests of one step.
PATIENCE = 64


class AdapterError(Exception):
    """A request or message names an adapter that is not loaded, or loads a taken lora_id."""


@dataclass(slots=True, eq=False)
class Adapter:
    ref: LoRARef
    loaded: bool = False
    draining: bool = False
    slot: int | None = None
    requests: int = 0  # accepted and not ended
    running: int = 0  # those of `requests` that hold pages
    last_use: int = 0  # logical tick at which one of its requests last stopped running
    slot_since: int = 0  # LoRASlots.shortages when it got its slot
    wanted_by: int = 0  # priority of its last request that lacked a slot
    users: Counter[int] = field(default_factory=Counter)  # running requests by priority


class LoRASlots:
    """Slots are numbered from 1. At most one adapter has a slot, and each at most one slot."""

    def __init__(self, num_slots: int, margin: int | None = None) -> None:
        """`margin`: how much higher a priority must be to outrank another; None: none does."""
        self.num_slots = num_slots
        self._margin = margin
        self.patience = PATIENCE
        self.shortages = 0  # short steps so far: steps in which an adapter lacked a slot
        self._short = False  # whether the step being planned is short
        self._adapters: dict[int, Adapter] = {}
        self._in_slot: dict[int, Adapter] = {}
        self._kept: dict[int, Adapter] = {}  # slot -> the adapter that it is kept for
        self._wishes: dict[int, int] = {}  # lora_id -> `shortages` when it began to lack a slot
        self._writes: list[tuple[int, int]] = []
        self._loads: list[LoRARef] = []
        self._drops: list[int] = []
        self._news: list[LoRALoaded | LoRAUnloaded] = []
        self._tick = 0

    # -- adapters: load and unload

    @property
    def loading(self) -> bool:
        return any(not adapter.loaded for adapter in self._adapters.values())

    def follow(self, message: LoadLoRAReq | UnloadLoRAReq) -> bool:
        """Load or unload; False if impossible, a bug of the front, which knows the adapters."""
        try:
            if isinstance(message, LoadLoRAReq):
                self.begin_load(message.ref)
            else:
                self.unload(message.lora_id)
        except AdapterError:
            return False
        return True

    def begin_load(self, ref: LoRARef) -> None:
        """Order a load; raise AdapterError if the lora_id is taken."""
        if ref.lora_id in self._adapters or ref.lora_id == BASE:
            raise AdapterError(f"lora_id {ref.lora_id} is taken")
        self._adapters[ref.lora_id] = Adapter(ref)
        self._loads.append(ref)

    def end_load(self, loaded: LoRALoaded) -> None:
        """Record the outcome of a load, and tell the front."""
        self._news.append(loaded)
        adapter = self._adapters[loaded.lora_id]
        if loaded.ok:
            adapter.loaded = True
            self._drop_if_unused(adapter)
        else:
            del self._adapters[loaded.lora_id]
            if adapter.draining:
                self._news.append(LoRAUnloaded(loaded.lora_id))

    def unload(self, lora_id: int) -> None:
        """Accept no more requests of an adapter; raise AdapterError if it is not loaded."""
        adapter = self._adapters.get(lora_id)
        if adapter is None or adapter.draining:
            raise AdapterError(f"lora_id {lora_id} is not loaded")
        adapter.draining = True
        self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: Adapter) -> None:
        if adapter.requests or not (adapter.draining and adapter.loaded):
            return
        if adapter.slot is not None:
            del self._in_slot[adapter.slot]
            self._writes.append((adapter.slot, BASE))
        lora_id = adapter.ref.lora_id
        del self._adapters[lora_id]
        self._writes = [write for write in self._writes if write[1] != lora_id]
        self._drops.append(lora_id)
        self._news.append(LoRAUnloaded(lora_id))

    # -- requests: accept, admit, retire, leave

    def accept(self, lora_id: int) -> None:
        """Count an accepted request; raise AdapterError if the adapter is not loaded."""
        if lora_id == BASE:
            return
        adapter = self._adapters.get(lora_id)
        if adapter is None or adapter.draining or not adapter.loaded:
            raise AdapterError(f"the adapter of this request (lora_id {lora_id}) is not loaded")
        adapter.requests += 1

    def may_run(self, lora_id: int, priority: int = 0) -> bool:
        """Whether a request of the adapter may start now, as far as slots are concerned."""
        if lora_id == BASE:
            return True
        adapter = self._adapters[lora_id]
        if adapter.slot is not None:
            owner = self._kept.get(adapter.slot)
            if owner is None or self._outranks(priority, owner.wanted_by):
                return True
            return self._has_time(adapter) and not self._outranks(owner.wanted_by, priority)
        return self._slot_for(adapter, priority) is not None

    def admit(self, lora_id: int, priority: int = 0) -> None:
        """Count a running request, and give its adapter a slot if it has none. Needs `may_run`."""
        if lora_id == BASE:
            return
        adapter = self._adapters[lora_id]
        if adapter.slot is None:
            slot = self._slot_for(adapter, priority)
            assert slot is not None, "admitted without a slot"
            self._take_slot(adapter, slot)
        self._forget_wish(adapter)
        adapter.running += 1
        adapter.users[priority] += 1

    def retire(self, lora_id: int, priority: int = 0) -> None:
        """Count off a running request that was retracted or has ended."""
        if lora_id == BASE:
            return
        adapter = self._adapters[lora_id]
        assert adapter.running > 0
        adapter.running -= 1
        adapter.users -= Counter((priority,))
        self._tick += 1
        adapter.last_use = self._tick

    def leave(self, lora_id: int) -> None:
        """Count off an accepted request that has ended; call after `retire`."""
        if lora_id == BASE:
            return
        adapter = self._adapters[lora_id]
        assert adapter.requests > adapter.running
        adapter.requests -= 1
        if adapter.requests == adapter.running:
            self._forget_wish(adapter)
        self._drop_if_unused(adapter)

    def lacks_slot(self, lora_id: int, priority: int = 0) -> bool:
        """Whether the adapter can get no slot in this step; if so, note that it wants one."""
        if self.may_run(lora_id, priority):
            return False
        self._short = True
        self._adapters[lora_id].wanted_by = priority
        self._wishes.setdefault(lora_id, self.shortages)
        return True

    def end_planning(self) -> None:
        """End the planning of a step: keep slots for adapters that have lacked one too long."""
        self.shortages += self._short
        self._short = False
        if self._margin is not None:
            self._keep_for_the_urgent()
        for lora_id, since in self._wishes.items():
            if self.shortages - since < self.patience:
                break
            adapter = self._adapters[lora_id]
            if adapter.slot is None and adapter not in self._kept.values():
                self._keep_a_slot(adapter)

    def num_users(self, lora_id: int) -> int:
        return self._adapters[lora_id].running

    def may_be_taken(self, lora_id: int, taker: int, priority: int) -> bool:
        """Whether `taker` could use the adapter's slot once the adapter's users are gone."""
        slot = self._adapters[lora_id].slot
        assert slot is not None, "runs without a slot"
        return self._adapters[taker].slot is None and self._is_open(
            slot, self._adapters[taker], priority
        )

    # -- orders for the runner, news for the front

    def slot_of(self, lora_id: int) -> int:
        if lora_id == BASE:
            return BASE
        slot = self._adapters[lora_id].slot
        assert slot is not None, "runs without a slot"
        return slot

    def take_writes(self) -> list[tuple[int, int]]:
        """Take (slot, lora_id) writes since the last call, in order; lora_id 0 clears the slot."""
        writes, self._writes = self._writes, []
        return writes

    def take_orders(self) -> LoRAOrders:
        """Take the adapters to load and to drop since the last call."""
        orders = LoRAOrders(self._loads, self._drops)
        self._loads, self._drops = [], []
        return orders

    def take_news(self) -> list[LoRALoaded | LoRAUnloaded]:
        """Take the messages to the front since the last call."""
        news, self._news = self._news, []
        return news

    def adapters(self) -> list[Adapter]:
        """All adapters, for checks and statistics."""
        return list(self._adapters.values())

    # -- slots

    def _outranks(self, priority: int, other: float) -> bool:
        return self._margin is not None and priority - other >= self._margin

    def _is_open(self, slot: int, adapter: Adapter, priority: int) -> bool:
        """Whether the slot is kept for the adapter, for none, or for one that it outranks."""
        owner = self._kept.get(slot, adapter)
        return owner is adapter or self._outranks(priority, owner.wanted_by)

    def _slot_for(self, adapter: Adapter, priority: int) -> int | None:
        """An unused slot: one kept for the adapter, else the open one unused for longest."""
        owners = self._kept.items()
        slots = [slot for slot, owner in owners if owner is adapter and self._is_unused(slot)]
        slots = slots or [
            slot
            for slot in range(1, self.num_slots + 1)
            if self._is_open(slot, adapter, priority) and self._is_unused(slot)
        ]
        return min(slots, key=self._last_use, default=None)

    def _has_time(self, adapter: Adapter) -> bool:
        """Whether its requests may still start although its slot is kept for another adapter."""
        return self.shortages - adapter.slot_since < self.patience

    def _is_unused(self, slot: int) -> bool:
        return slot not in self._in_slot or not self._in_slot[slot].running

    def _last_use(self, slot: int) -> tuple[int, int]:
        return (self._in_slot[slot].last_use if slot in self._in_slot else 0), slot

    def _take_slot(self, adapter: Adapter, slot: int) -> None:
        if slot in self._in_slot:
            self._in_slot[slot].slot = None
        self._in_slot[slot] = adapter
        adapter.slot = slot
        adapter.slot_since = self.shortages
        self._writes.append((slot, adapter.ref.lora_id))

    def _keep_a_slot(self, adapter: Adapter) -> None:
        """Keep the slot that is likely free soonest: past its time, then with the fewest users."""

        def wait(slot: int) -> tuple[bool, int, int]:
            user = self._in_slot[slot]
            return self._has_time(user), user.running, slot

        slots = [slot for slot in self._in_slot if slot not in self._kept]
        if slots:
            self._kept[min(slots, key=wait)] = adapter

    def _keep_for_the_urgent(self) -> None:
        """Keep slots whose running requests are all outranked at once, so that no more start."""
        wanting = [self._adapters[lora_id] for lora_id in self._wishes]
        for adapter in sorted(wanting, key=lambda one: -one.wanted_by):  # stable: of equals oldest
            if adapter.slot is not None or adapter in self._kept.values():
                continue
            slots = [
                slot
                for slot, user in self._in_slot.items()
                if self._is_open(slot, adapter, adapter.wanted_by)
                and self._outranks(adapter.wanted_by, max(user.users, default=-math.inf))
            ]
            if slots:
                fewest = min(slots, key=lambda slot: (self._in_slot[slot].running, slot))
                self._kept[fewest] = adapter

    def _forget_wish(self, adapter: Adapter) -> None:
        self._wishes.pop(adapter.ref.lora_id, None)
        self._kept = {slot: owner for slot, owner in self._kept.items() if owner is not adapter}
