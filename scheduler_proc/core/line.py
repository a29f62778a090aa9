"""Line: the waiting requests of one tenant, or of all tenants, in a policy's order. PURE.

Owned by core/waiting_queue.py. The requests of each adapter are kept apart, so that a step without
a slot for an adapter passes over all of them at once.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable

from .lane import Merge, Waiter
from .lazy_heap import LazyHeap
from .radix_cache import Match
from .req import Req
from .schedule_policy import Order

LacksSlot = Callable[[Req], bool]  # whether no adapter slot can be had for it in this step


class Gate:
    """The adapters without a slot and the groups awaiting a prefix that a step leaves out.

    Made anew for each step. An adapter is checked when the first of its requests comes up.
    """

    def __init__(self, lacks_slot: LacksSlot) -> None:
        self._lacks_slot = lacks_slot
        self.shut_adapters: set[int] = set()
        self.shut_groups: set[bytes] = set()

    def shuts(self, req: Req) -> bool:
        """Whether the step leaves out the request's adapter; asks `lacks_slot` if not known."""
        if req.lora_id in self.shut_adapters:
            return True
        if self._lacks_slot(req):
            self.shut_adapters.add(req.lora_id)
            return True
        return False

    def shut_group(self, group: bytes) -> None:
        if group:
            self.shut_groups.add(group)


class _Share:
    """The requests of one adapter in a line."""

    __slots__ = ("ages", "order")

    def __init__(self, order: Order) -> None:
        self.order = order
        self.ages: LazyHeap[Waiter] = LazyHeap()  # oldest first


class Line:
    """Requests in a policy's order; one overtaken by `max_overtakes` later arrivals goes next.

    A later arrival that overtakes a request also overtakes every older one here. So one sorted list
    suffices: the arrivals that have started and are later than the oldest request still waiting.
    """

    def __init__(self, make_order: Callable[[], Order], max_overtakes: int | None) -> None:
        self._make_order = make_order
        self._max_overtakes = max_overtakes
        self._shares: dict[int, _Share] = {}
        self._overtakers: list[int] = []  # sorted; started arrivals after the oldest waiting one
        self._merge = Merge(())
        self._step = -1
        self.parts: Counter[tuple[int, bytes]] = Counter()  # requests by adapter and group

    def __len__(self) -> int:
        return sum(len(share.ages) for share in self._shares.values())

    @property
    def oldest(self) -> Req:
        return min((self._oldest_of(share) for share in self._shares.values()), key=_arrival)

    @staticmethod
    def _oldest_of(share: _Share) -> Req:
        entry = share.ages.peek()
        assert entry is not None, "a share without requests"
        return entry.item.req

    def add(self, waiter: Waiter, match: Match | None) -> None:
        lora_id = waiter.req.lora_id
        share = self._shares.get(lora_id)
        if share is None:
            share = self._shares[lora_id] = _Share(self._make_order())
        waiter.by_age = share.ages.push((waiter.req.arrival,), waiter)
        share.order.add(waiter, match)
        self.parts[lora_id, waiter.group] += 1

    def move(self, waiter: Waiter, match: Match | None) -> None:
        """Reorder a request whose match has changed."""
        order = self._shares[waiter.req.lora_id].order
        order.remove(waiter)
        order.add(waiter, match)

    def remove(self, waiter: Waiter) -> None:
        lora_id = waiter.req.lora_id
        share = self._shares[lora_id]
        assert waiter.by_age is not None
        share.ages.remove(waiter.by_age)
        share.order.remove(waiter)
        if not len(share.ages):
            del self._shares[lora_id]
        self.parts[lora_id, waiter.group] -= 1
        if not self.parts[lora_id, waiter.group]:
            del self.parts[lora_id, waiter.group]
        if self._overtakers and self._shares:
            del self._overtakers[: bisect.bisect(self._overtakers, self.oldest.arrival)]

    def start(self, waiter: Waiter) -> None:
        """Remove an admitted request, and record it if it overtook an older one."""
        self.remove(waiter)
        arrival = waiter.req.arrival
        if self._max_overtakes is None or not self._shares or self.oldest.arrival > arrival:
            return
        index = bisect.bisect_left(self._overtakers, arrival)
        if self._overtakers[index : index + 1] != [arrival]:
            self._overtakers.insert(index, arrival)

    def is_overdue(self, req: Req) -> bool:
        return req.arrival < self._overdue_before()

    def _overdue_before(self) -> float:
        """The arrival before which every request here has been overtaken `max_overtakes` times."""
        most = self._max_overtakes
        if most is None or len(self._overtakers) < most:
            return -math.inf
        return self._overtakers[-most] if most else math.inf

    # -- one step

    def begin(self, step: int, now: int) -> None:
        """Begin step number `step`, unless it has begun. `now`: tokens computed so far."""
        if self._step != step:
            self._step = step
            for share in self._shares.values():
                share.order.begin(now)
            self._merge = Merge(share.order for share in self._shares.values())

    def next(self, gate: Gate) -> Waiter | None:
        """The next request to try in this step; None if none is left, or if an overdue one was
        tried and did not start.

        An overdue request whose adapter lacks a slot blocks no others: one of them may have to free
        that slot. A request that was retracted in this step is not tried in it.
        """
        overdue = self._oldest_overdue(gate)
        if overdue is not None:
            return None if self._is_past(overdue) else self._tried(overdue)
        while (found := self._merge.peek()) is not None:
            waiter = found[1]
            if gate.shuts(waiter.req):
                self._merge.leave()
                continue
            self._merge.take()
            if self._is_past(waiter):
                waiter.try_next_of_group()
            elif waiter.group not in gate.shut_groups:
                return self._tried(waiter)
        return None

    def _is_past(self, waiter: Waiter) -> bool:
        return self._step in (waiter.tried, waiter.added)

    def _tried(self, waiter: Waiter) -> Waiter:
        waiter.tried = self._step
        return waiter

    def _oldest_overdue(self, gate: Gate) -> Waiter | None:
        """The oldest overdue request whose adapter is not left out."""
        before = self._overdue_before()
        if before == -math.inf:
            return None
        heads = [share.ages.peek() for share in self._shares.values()]
        overdue = [head.item for head in heads if head is not None and head.key[0] < before]
        for waiter in sorted(overdue, key=lambda one: one.req.arrival):
            if not gate.shuts(waiter.req):
                return waiter
        return None


def _arrival(req: Req) -> int:
    return req.arrival
