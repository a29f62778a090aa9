"""I24 and I25: whoever needs nothing that is scarce starts, and so does whoever outranks the rest.

Owned by `World`. Looks at the scheduler when it has tried the waiting requests of a step.
"""

from collections.abc import Callable

from tokenloom.scheduler_proc.core.prefill_adder import PrefillAdder
from tokenloom.scheduler_proc.core.prefix_groups import PrefixLeaders
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.retraction import MAX_RETRACTIONS
from tokenloom.scheduler_proc.core.scheduler import MAX_LAUNCHED, Scheduler


class Waits:
    def __init__(self, core: Scheduler, count: Callable[[str], None], *, faults: bool) -> None:
        self._core = core
        self._faults = faults
        self._count = count
        self._no_room = False  # a request that was tried in this step did not fit
        self._without_slot: set[int] = set()  # adapters, in this step
        self._back: set[int] = set()  # rids retracted while the step is planned
        self._for_slot: dict[int, int] = {}  # steps that the first in order has waited, by rid
        settings = core._settings
        self._by_priority = settings.schedule_policy == "priority" and settings.fairness == "none"
        self._watch()

    def _watch(self) -> None:
        core, loras = self._core, self._core._loras
        start_waiting, lacks_slot, retract = core._start_waiting, loras.lacks_slot, core._retract

        def planned(adder: PrefillAdder) -> None:
            self._no_room = False
            self._without_slot.clear()
            self._back.clear()
            add_new = adder.add_new

            def tried(req: Req) -> bool:
                added = add_new(req)
                self._no_room |= not added
                return added

            adder.add_new = tried  # type: ignore[method-assign]
            start_waiting(adder)
            if not core._settle_first and adder.failed is None:
                self._check(adder)

        def lacking(lora_id: int, priority: int = 0) -> bool:
            lacks = lacks_slot(lora_id, priority)
            if lacks:
                self._without_slot.add(lora_id)
            return lacks

        def retracted(req: Req) -> None:
            self._back.add(req.rid)
            retract(req)

        core._start_waiting = planned  # type: ignore[method-assign]
        loras.lacks_slot = lacking  # type: ignore[method-assign]
        core._retract = retracted  # type: ignore[method-assign]

    def _check(self, adder: PrefillAdder) -> None:
        core = self._core
        waiting = [req for req in core._waiting if req.rid not in self._back]
        if not waiting or adder.was_cut:
            return
        settings = core._settings
        grouped = 0 if settings.disable_radix_cache else settings.prefix_group_tokens
        leaders = PrefixLeaders(grouped, settings.page_size)
        for batch in core._launched:
            for req, _ in batch.extends:
                leaders.add(req)
        for req in ([core._chunked] if core._chunked else []) + [req for req, _ in adder.added]:
            leaders.add(req)
        if core._kv.rows.available and not self._no_room:
            self._check_nothing_scarce(waiting, leaders, adder)
        if self._by_priority and not self._faults:
            self._check_first(min(waiting, key=_by_priority), leaders, adder)

    def _check_nothing_scarce(
        self, waiting: list[Req], leaders: PrefixLeaders, adder: PrefillAdder
    ) -> None:
        if not all(adder.has_budget_for(req) for req in waiting):
            return
        self._count("nothing scarce")
        if len(waiting) > 256:
            self._count("nothing scarce: a crowd")
        lines = self._core._waiting
        names = [lines._line_name(req) for req in waiting]
        # An overdue request lets no other one of its line by, also if it became overdue just now.
        closed = {
            name
            for name, req in zip(names, waiting, strict=True)
            if lines._lines[name].is_overdue(req)
        }
        for name, req in zip(names, waiting, strict=True):
            lacks = req.lora_id in self._without_slot
            assert lacks or name in closed or leaders.held_from(req) is not None, (
                f"I24: {req.rid} waits, though it lacks nothing"
            )

    def _check_first(self, req: Req, leaders: PrefixLeaders, adder: PrefillAdder) -> None:
        """The request that is first in order has not started."""
        core = self._core
        threshold, running = core._settings.preemption_threshold, core._running.values()
        if threshold is not None and not adder.added and leaders.held_from(req) is None:
            outranks = all(
                req.priority - one.priority >= threshold and one.retractions < MAX_RETRACTIONS
                for one in running
            )
            tried = adder.has_budget_for(req) and adder._first_piece(req) > 0
            assert not (outranks and tried), f"I25: {req.rid} waits for lower priorities"
        users = [one for one in running if one.lora_id]
        higher = any(one.priority >= req.priority for one in users)
        waits = req.lora_id in self._without_slot and not higher
        steps = self._for_slot.get(req.rid, 0) + 1 if waits else 0
        self._for_slot = {req.rid: steps}
        if steps > 1:
            self._count("the first in order waits for a slot")
        turn = 2 * core._limits.context_length + 2 * MAX_LAUNCHED
        assert steps <= turn, f"I25: {req.rid} waits for a slot that lower priorities have"


def _by_priority(req: Req) -> tuple[int, int]:
    return -req.priority, req.arrival
