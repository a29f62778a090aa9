"""WaitingQueue: who may start next, by policy, age, fairness, prefix groups and look-ahead.

Owned by core/scheduler.py, which tells it of every request that comes, starts, is charged and ends.
Lines are one per tenant with --fairness vtc, else there is one. PURE.
"""

import bisect
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter

from ...wire.scheduling_config import SchedulingConfig
from .fairness import VirtualTokenCounters
from .kv_cache import KVCache
from .lookahead import Lookahead
from .match_index import MatchIndex
from .prefix_groups import PrefixLeaders
from .radix_cache import Match
from .req import Req
from .schedule_policy import MATCH_POLICIES, Order, make_order

_MAX_PASSED_OVER = 256  # in a step; a pass costs no more, however many wait for what others have
_by_arrival = attrgetter("arrival")
LacksSlot = Callable[[int], bool]  # of a lora_id: no request of it can start in this step


class Line:
    """Requests in the order of a policy, none of them overtaken by more than `max_overtakes`.

    Whoever is overtaken overtakes as well: the older of two has let at least as many later arrivals
    by as the younger. So the arrivals that started before the oldest one here are all to remember.
    """

    def __init__(self, order: Order, max_overtakes: int | None) -> None:
        self._order = order
        self._max_overtakes = max_overtakes
        self._by_arrival: list[Req] = []
        self._overtakers: list[int] = []  # sorted arrivals, all after the oldest one here

    def __len__(self) -> int:
        return len(self._by_arrival)

    @property
    def oldest(self) -> Req:
        return self._by_arrival[0]

    def add(self, req: Req, match: Match | None) -> None:
        bisect.insort(self._by_arrival, req, key=_by_arrival)
        self._order.add(req, match)

    def move(self, req: Req, match: Match | None) -> None:
        """Its match has changed."""
        self._order.remove(req)
        self._order.add(req, match)

    def remove(self, req: Req) -> None:
        index = bisect.bisect_left(self._by_arrival, req.arrival, key=_by_arrival)
        assert self._by_arrival[index] is req
        del self._by_arrival[index]
        self._order.remove(req)
        if index == 0 and self._by_arrival:
            del self._overtakers[: bisect.bisect(self._overtakers, self.oldest.arrival)]

    def start(self, req: Req) -> None:
        self.remove(req)
        if self._by_arrival and self.oldest.arrival < req.arrival:
            index = bisect.bisect_left(self._overtakers, req.arrival)
            if self._overtakers[index : index + 1] != [req.arrival]:
                self._overtakers.insert(index, req.arrival)

    def is_overdue(self, req: Req) -> bool:
        if self._max_overtakes is None:
            return False
        earlier = bisect.bisect(self._overtakers, req.arrival)
        return len(self._overtakers) - earlier >= self._max_overtakes

    def in_order(self, now: int, lacks_slot: LacksSlot) -> Iterator[Req]:
        """Each once, while those before it may start; ends when an overdue one has not.

        But one that lacks a slot is waited for by nobody: they may be those who are to give it.
        """
        seen: set[int] = set()
        at = 0  # how many of the oldest are overdue and lack a slot
        for req in self._order.in_order(now):
            while at < len(self._by_arrival) and self.is_overdue(first := self._by_arrival[at]):
                if first.rid not in seen:
                    seen.add(first.rid)
                    yield first
                elif lacks_slot(first.lora_id):
                    at += 1
                else:
                    return
            if req.rid not in seen:
                seen.add(req.rid)
                yield req


class WaitingQueue:
    def __init__(self, settings: SchedulingConfig, kv: KVCache) -> None:
        self._settings = settings
        self._kv = kv
        self._reqs: dict[int, Req] = {}
        self._lines: dict[str, Line] = {}
        self._index = MatchIndex(kv) if settings.schedule_policy in MATCH_POLICIES else None
        self._counters = (
            VirtualTokenCounters(settings.vtc_output_weight) if settings.fairness == "vtc" else None
        )

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    # -- what the scheduler tells

    def add(self, req: Req) -> None:
        """A new request, or one that has been retracted: it keeps its arrival."""
        self._reqs[req.rid] = req
        name = self._line_name(req)
        if self._counters is not None and not req.retractions:
            self._counters.enter(name)
        if name not in self._lines:
            self._open_line(name)
        self._lines[name].add(req, self._index.file(req) if self._index else None)

    def start(self, req: Req) -> None:
        """A candidate has been admitted."""
        assert req.kv is not None
        name = self._line_name(req)
        if self._counters is not None and not req.admitted:
            self._counters.charge_prompt(name, len(req.ids) - req.kv.computed)
        self._lines[name].start(req)
        self._close(req)

    def charge_answer(self, req: Req) -> None:
        """A token of its answer has been generated."""
        if self._counters is not None:
            self._counters.charge_answer(self._line_name(req))

    def end(self, req: Req) -> None:
        """A request has ended, waiting or not."""
        if req.rid in self._reqs:
            self._lines[self._line_name(req)].remove(req)
            self._close(req)
        if self._counters is not None:
            self._counters.end(self._line_name(req))

    def _line_name(self, req: Req) -> str:
        return "" if self._counters is None else req.tenant

    def _open_line(self, name: str) -> None:
        policy = self._settings.schedule_policy
        bound = None if policy == "priority" else self._settings.max_overtakes
        self._lines[name] = Line(make_order(policy, self._kv.page_size), bound)
        if self._counters is not None:
            self._counters.join(name)

    def _close(self, req: Req) -> None:
        """The line no longer has it."""
        del self._reqs[req.rid]
        if self._index is not None:
            self._index.drop(req)
        name = self._line_name(req)
        if not len(self._lines[name]):
            del self._lines[name]
            if self._counters is not None:
                self._counters.leave(name)

    # -- who goes next

    def candidates(
        self,
        now: int,
        extending: Iterable[Req],
        lacks_slot: LacksSlot,
        running: Collection[object],
    ) -> Iterator[Req]:
        """Requests that may start, best first; ends where the pool is to be held for one of them.

        The caller admits a candidate (`start`) or finds that it does not fit, and only then asks
        for the next one. `extending`: of whose prompts this step or a launched one computes a
        piece. Who lacks a slot for its adapter is passed over, as are those who wait for a prefix:
        so many in a step, but all while nobody is `running` (a live view), or nothing would move.
        """
        self._refresh()
        settings = self._settings
        grouped = 0 if settings.disable_radix_cache else settings.prefix_group_tokens
        leaders = PrefixLeaders(grouped, self._kv.page_size)
        for req in extending:
            leaders.add(req)
        lookahead = Lookahead(settings.max_skips, settings.lookahead)
        passed_over = 0
        for req in self._in_order(now, lacks_slot):
            # Who has been let by too often, or whose answer has begun, lets nobody by.
            urgent = req.retractions > 0 or self._lines[self._line_name(req)].is_overdue(req)
            if lacks_slot(req.lora_id) or (not urgent and leaders.include(req)):
                passed_over += 1
                if passed_over >= _MAX_PASSED_OVER and running:
                    return
                continue
            yield req
            if req.rid in self._reqs:
                if not lookahead.did_not_fit(req, urgent=urgent):
                    return
            else:
                leaders.add(req)
                if not lookahead.started():
                    return

    def _refresh(self) -> None:
        if self._index is not None:
            for req in self._index.take_stale():
                self._lines[self._line_name(req)].move(req, self._index.file(req))

    def _in_order(self, now: int, lacks_slot: LacksSlot) -> Iterator[Req]:
        lines = list(self._lines.items())
        if self._counters is None:
            for _, line in lines:
                yield from line.in_order(now, lacks_slot)
            return
        heap = [(self._counters[name], line.oldest.arrival, name) for name, line in lines]
        heapq.heapify(heap)
        orders: dict[str, Iterator[Req]] = {}
        while heap:
            _, arrival, name = heap[0]
            if name not in orders:
                orders[name] = self._lines[name].in_order(now, lacks_slot)
            req = next(orders[name], None)
            if req is not None:
                yield req
            if req is None or name not in self._lines:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (self._counters[name], arrival, name))
