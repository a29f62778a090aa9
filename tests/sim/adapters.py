"""What the front would know of adapters: which loads there are and what was said of them.

Owned by `World`, which passes it events and what the scheduler says; it holds the core and the
runner to the laws of adapters. Loads are followed as the loop does it, after each turn.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sim.situations import Situations

from tokenloom.bench.simulation.driver import Driver
from tokenloom.scheduler_proc.core.req import Req, ReqState
from tokenloom.scheduler_proc.core.scheduler import MAX_LAUNCHED
from tokenloom.scheduler_proc.worker_batch import ModelWorkerBatch
from tokenloom.wire.messages import (
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    ToDetokenizer,
    ToScheduler,
    UnloadLoRAReq,
)


@dataclass(slots=True, eq=False)
class Load:
    """One load of a name. The front sends no request before `ready` and none after `unloading`."""

    ref: LoRARef
    fails: bool
    read: bool = False  # or it could not be
    ready: bool = False
    unloading: bool = False
    over: bool = False  # failed, or freed

    @property
    def serves(self) -> bool:
        return self.ready and not self.unloading


@dataclass(slots=True, eq=False)
class Lack:
    """An adapter is waited for and has no slot."""

    since: int  # by LoRASlots.shortages
    turns: int  # that it may have to wait for: of who has a slot, and of who began to wait before
    steps: int = 0  # with a shortage, and all slots in use


class Adapters:
    def __init__(
        self, driver: Driver, situations: Situations, deliver: Callable[[ToScheduler], None]
    ) -> None:
        """`deliver` sends a message and hears what comes of it."""
        self.loads: dict[int, Load] = {}
        self._lacks: dict[int, Lack] = {}
        self._shortages = 0
        self._driver = driver
        self._core = driver.scheduler
        self._runner = driver.runner.loras
        self._situations = situations
        self._deliver = deliver

    @property
    def loading(self) -> list[int]:
        return [key for key, load in self.loads.items() if not load.read]

    @property
    def serving(self) -> list[int]:
        return [key for key, load in self.loads.items() if load.serves]

    def serves(self, lora_id: int) -> bool:
        return lora_id == 0 or (lora_id in self.loads and self.loads[lora_id].serves)

    # -- events; each says whether the scheduler must count a violation

    def load(self, lora_id: int, name: str, fails: bool) -> bool:
        ref = LoRARef(lora_id, name, f"/{lora_id}")
        known = self.loads.get(lora_id)
        if known is None:
            self.loads[lora_id] = Load(ref, fails)
            if fails:
                self._runner.broken.add(ref.path)
            if any(self.loads[other].ref.name == name for other in self.serving):
                self._situations.count("load: of a name in use")
            self._situations.count("load")
        elif known.over:
            return False  # the front never names an id again, and the core has forgotten it
        else:
            self._situations.count("load: an id again")
        self._deliver(LoadLoRAReq(ref))
        return known is not None

    def unload(self, lora_id: int) -> bool:
        load = self.loads.get(lora_id)
        wrong = load is None or load.over or load.unloading
        if load is not None and not wrong:
            load.unloading = True
            self._situations.count(f"unload: {self._use(load)}")
        self._deliver(UnloadLoRAReq(lora_id))
        return wrong

    def end_loads(self, most: int, hear: Callable[[list[ToDetokenizer]], None]) -> None:
        """The runner has read the first `most` of those that it was told to read."""
        for loaded in self._runner.take_loaded(most):
            hear(self._core.lora_loaded(loaded))
            load = self.loads[loaded.lora_id]
            assert load.read, "I11: the end of a load was not told"
            if load.serves:
                self._replace(load)

    def _replace(self, load: Load) -> None:
        """A name has new weights: what it meant before is unloaded."""
        for lora_id in self.serving:
            other = self.loads[lora_id]
            if other is not load and other.ref.name == load.ref.name:
                self._situations.count("a name replaced")
                self.unload(lora_id)

    def _use(self, load: Load) -> str:
        """The rarest state that a request with it is in."""
        if not load.read:
            return "while loading"
        reqs = self._reqs_of(load.ref.lora_id)
        if any(req.in_flight for req in reqs):
            return "in flight"
        states = {req.state for req in reqs}
        if any(req.retractions and req.state is ReqState.WAITING for req in reqs):
            return "retracted"
        if states <= {ReqState.WAITING}:
            return "waiting" if states else "unused"
        return "running"

    def _reqs_of(self, lora_id: int) -> list[Req]:
        return [req for req in self._core._reqs.values() if req.lora_id == lora_id]

    # -- what is said

    def hear(self, message: LoRALoaded | LoRAUnloaded) -> None:
        load = self.loads[message.lora_id]
        assert not load.over, "I11: news of an adapter that is gone"
        if isinstance(message, LoRAUnloaded):
            assert load.unloading, "I11: unloaded without being asked to"
            assert load.read, "I11: unloaded before its load has ended"
            assert not self._reqs_of(message.lora_id), "I11: unloaded while it is used"
            load.ready, load.over = False, True
            return
        assert not load.read, "I11: loaded twice"
        assert message.ok is not load.fails, "I11: how a load ended"
        load.read, load.ready = True, message.ok
        if load.fails:
            load.over = not load.unloading
            self._situations.count("load: failed")

    # -- laws

    def follow(self) -> None:
        """The end of a turn: the runner does what the core wants, and has what the core has."""
        self._runner.follow(self._core.take_lora_orders())
        there = {key for key, load in self.loads.items() if load.ready}
        assert self._runner.present == there, "I11: other adapters in memory than are in use"

    def check_step(self, batch: ModelWorkerBatch) -> None:
        """Before it lands: every row reads the adapter of its request."""
        used = {slot for slot in batch.lora_slots if slot}
        assert len(used) <= self._core._loras.num_slots, "I11: more adapters than slots"
        if len(used) > 1:
            self._situations.count("step: several adapters")
        for _slot, lora_id in batch.new_loras:
            self._situations.count("slot written" if lora_id else "slot cleared")
        self._check_lacks()

    def _check_lacks(self) -> None:
        """A turn is as long as patience, and then one request, and what is in flight.

        Where a slot is free and kept, its owner lacks something else: that is no wait for a turn.
        Nor is a step in which requests that outrank it use adapters or wait for one.
        """
        loras = self._core._loras
        before, self._lacks = self._lacks, {}
        for turns, (lora_id, since) in enumerate(loras._wishes.items(), 1):
            known = before.get(lora_id)
            same = known is not None and known.since == since
            self._lacks[lora_id] = known if known is not None and same else Lack(since, turns)
        short = loras.shortages > self._shortages
        short = short and not any(loras._is_unused(slot + 1) for slot in range(loras.num_slots))
        self._shortages = loras.shortages
        turn = loras.patience + self._core._limits.context_length + MAX_LAUNCHED
        for lora_id, lack in self._lacks.items():
            lack.steps = 0 if self._is_outranked(lora_id) else lack.steps + short
            assert lack.steps <= loras.patience + lack.turns * turn, f"I8: {lora_id} starves"

    def _is_outranked(self, lora_id: int) -> bool:
        loras = self._core._loras
        adapters = {adapter.ref.lora_id: adapter for adapter in loras.adapters()}
        mine = adapters.pop(lora_id).wanted_by
        return any(
            loras._outranks(max(other.users, default=mine), mine)
            or (key in loras._wishes and loras._outranks(other.wanted_by, mine))
            for key, other in adapters.items()
        )

    def check(self) -> None:
        """I11, from scratch."""
        loras = self._core._loras
        requests = Counter(req.lora_id for req in self._core._reqs.values())
        running = Counter(req.lora_id for req in self._core._running.values())
        known = {adapter.ref.lora_id: adapter for adapter in loras.adapters()}
        assert set(known) == {key for key, load in self.loads.items() if not load.over}, "I11"
        assert {key for key in requests if key} <= set(known), "I11: a request without its adapter"
        for lora_id, adapter in known.items():
            counted = (adapter.requests, adapter.running)
            assert counted == (requests[lora_id], running[lora_id]), f"I11: uses of {lora_id}"
            assert adapter.slot is not None or not adapter.running, "I11: runs without a slot"
            assert adapter.loaded == self.loads[lora_id].ready
            assert lora_id not in loras._wishes or adapter.requests > adapter.running, "I11: wishes"
        slots = {adapter.slot: adapter for adapter in known.values() if adapter.slot is not None}
        assert slots == loras._in_slot, "I11: slots"
        assert set(slots) <= set(range(1, loras.num_slots + 1)), "I11: slots"
        for slot, owner in loras._kept.items():
            assert owner.requests, "I11: a slot is kept for an adapter that nobody wants"
            assert owner.slot is None
            if slot in slots and slots[slot].running:
                self._situations.count("a slot kept, in use")

    def finish(self, hear: Callable[[list[ToDetokenizer]], None]) -> None:
        """No request is left: end all loads, unload all adapters; nothing may stay (I20)."""
        self.follow()
        self.end_loads(len(self.loads), hear)
        for lora_id in self.serving:
            self.unload(lora_id)
        self.follow()
        loras = self._core._loras
        assert not loras.adapters(), "I20: an adapter is left"
        assert not loras._in_slot, "I20: a slot is taken"
        assert not loras._kept, "I20: a slot is kept"
        assert not self._runner.present, "I20: an adapter is in memory"
