"""Preemption: which running requests to retract for one of higher priority. PURE.

Made anew for each step by core/scheduler.py. A request may lack a slot for its adapter, a row, or
room in the pool. To free a slot, all running requests of another adapter must be retracted.
"""

import math
from collections.abc import Collection

from ...wire.scheduling_config import SchedulingConfig
from .lora_slots import BASE, LoRASlots
from .prefill_adder import PrefillAdder
from .req import Req
from .retraction import is_protected


def slot_margin(settings: SchedulingConfig) -> int | None:
    """How much higher a priority must be to take precedence over an adapter that waits for a slot;
    None: priorities do not count.
    """
    if settings.schedule_policy == "priority" and settings.fairness == "none":
        return 1
    return settings.preemption_threshold


class Preemption:
    def __init__(
        self,
        settings: SchedulingConfig,
        loras: LoRASlots,
        running: Collection[Req],
        adder: PrefillAdder,
    ) -> None:
        self._threshold = settings.preemption_threshold
        self._loras = loras
        self._running = running  # a live view
        self._adder = adder
        self._for_slot: tuple[Req, list[Req]] | None = None  # last request with slot victims
        self._ranks: dict[int, float] = {}
        self._ranked = -1  # requests added to the step when `_ranks` was made

    @property
    def allowed(self) -> bool:
        return self._threshold is not None

    def end(self) -> None:
        """Allow no more preemption in this step: only the first that does not fit may preempt."""
        self._threshold = None

    def lacks_slot(self, req: Req) -> bool:
        """Whether its adapter can get no slot in this step, not even by preemption."""
        if self._loras.may_run(req.lora_id, req.priority):
            return False
        if victims := self._users_in_the_way(req):
            self._for_slot = req, victims
            return False
        return self._loras.lacks_slot(req.lora_id, req.priority)

    def starts(self, req: Req) -> bool:
        """Add `req` to the step if it has a slot and fits without preemption; False if not."""
        return self._loras.may_run(req.lora_id, req.priority) and self._adder.add_new(req)

    def victims_for(self, req: Req) -> list[Req]:
        """The fewest running requests to retract so that `req` can start; empty if none suffice."""
        if self._threshold is None:
            return []
        self._ranked = -1
        if self._loras.may_run(req.lora_id, req.priority):
            return self._adder.victims_for(req, self._threshold)
        assert self._for_slot is not None, "tried without a slot"
        assert self._for_slot[0] is req, "tried without a slot"
        return self._for_slot[1]

    def _users_in_the_way(self, req: Req) -> list[Req]:
        """Requests to retract so that `req` has a slot, a row and room; empty if none suffice."""
        if self._threshold is None:
            return []
        limit = req.priority - self._threshold
        ranks = self._highest_ranks()
        slots = [
            (self._loras.num_users(lora_id), lora_id)
            for lora_id, rank in ranks.items()
            if rank <= limit and self._loras.may_be_taken(lora_id, req.lora_id, req.priority)
        ]
        if not slots:
            return []
        _, cheapest = min(slots)
        users = [other for other in self._running if other.lora_id == cheapest]
        return self._adder.victims_for(req, self._threshold, users)

    def _highest_ranks(self) -> dict[int, float]:
        """Highest priority of the running requests of each adapter, by lora_id; infinite if one of
        them is protected or gets tokens in this step.
        """
        added = self._adder.added
        if self._ranked != len(added):
            self._ranked, self._ranks = len(added), {}
            busy = {other for other, _ in added}
            for one in self._running:
                if one.lora_id != BASE:
                    stays = is_protected(one) or one in busy
                    rank = math.inf if stays else float(one.priority)
                    self._ranks[one.lora_id] = max(rank, self._ranks.get(one.lora_id, rank))
        return self._ranks
