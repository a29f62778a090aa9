"""WaitingQueue: the next requests to start, by policy, age, fairness, prefix groups and look-ahead.

Owned by core/scheduler.py, which reports every request that comes, starts, gets a token or ends.
There is one line per tenant with --fairness vtc, else one. A step's cost depends on the requests
that it tries and on the adapters that requests wait for, not on how many requests wait. PURE.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from ...wire.scheduling_config import SchedulingConfig
from .fairness import VirtualTokenCounters
from .kv_cache import KVCache
from .lane import Waiter
from .line import Gate, LacksSlot, Line
from .lookahead import Lookahead
from .match_index import MatchIndex
from .prefix_groups import PrefixLeaders, prefix_digest
from .req import Req
from .schedule_policy import MATCH_POLICIES, order_factory
from .turns import Turns

# Only some of a group may share a leader's longer prefix, so each one is checked. After this many
# held requests in a step the rest of the group is left out of it, to bound the step's cost.
_MAX_PASSED_OVER = 256


class WaitingQueue:
    def __init__(self, settings: SchedulingConfig, kv: KVCache) -> None:
        self._settings = settings
        self._kv = kv
        self._waiters: dict[int, Waiter] = {}
        self._lines: dict[str, Line] = {}
        self._index = MatchIndex(kv) if settings.schedule_policy in MATCH_POLICIES else None
        self._counters: VirtualTokenCounters | None = None
        self._turns: Turns | None = None
        if settings.fairness == "vtc":
            self._counters = VirtualTokenCounters(settings.vtc_output_weight)
            self._turns = Turns(self._turn_of)
        grouped = 0 if settings.disable_radix_cache else settings.prefix_group_tokens
        self._group_tokens = -(-grouped // kv.page_size) * kv.page_size
        self._prefixes: Counter[bytes] = Counter()  # waiting requests by prefix digest
        self._step = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Req]:
        return (waiter.req for waiter in self._waiters.values())

    # -- reports from the scheduler

    def add(self, req: Req) -> None:
        """Queue a new request, or a retracted one, which keeps its arrival."""
        waiter = self._waiters[req.rid] = Waiter(req, added=self._step)
        if not req.retractions:  # a retracted request waits for no prefix
            self._group(waiter)
        name = self._line_name(req)
        if self._counters is not None and not req.retractions:
            self._counters.enter(name)
        if name not in self._lines:
            self._open_line(name)
        line = self._lines[name]
        line.add(waiter, self._index.file(req) if self._index else None)
        part = (req.lora_id, waiter.group)
        if self._turns is not None and line.parts[part] == 1:
            self._turns.join(name, part)

    def start(self, req: Req) -> None:
        """Remove an admitted candidate and charge its tenant for the uncached prompt."""
        assert req.kv is not None
        name = self._line_name(req)
        if self._counters is not None and not req.admitted:
            self._counters.charge_prompt(name, len(req.ids) - req.kv.computed)
        self._lines[name].start(self._waiters[req.rid])
        self._close(req)

    def charge_answer(self, req: Req) -> None:
        """Charge the tenant for one generated token."""
        if self._counters is not None:
            self._counters.charge_answer(self._line_name(req))

    def end(self, req: Req) -> None:
        """Remove a request that has ended, whether it waited or ran."""
        if req.rid in self._waiters:
            self._lines[self._line_name(req)].remove(self._waiters[req.rid])
            self._close(req)
        if self._counters is not None:
            self._counters.end(self._line_name(req))

    def _line_name(self, req: Req) -> str:
        return "" if self._counters is None else req.tenant

    def _group(self, waiter: Waiter) -> None:
        """Put it into the group of its prefix if others wait with it; the first stays ungrouped."""
        prefix = waiter.prefix = prefix_digest(waiter.req, self._group_tokens)
        if prefix:
            self._prefixes[prefix] += 1
            if self._prefixes[prefix] > 1:
                waiter.group = prefix

    def _open_line(self, name: str) -> None:
        policy = self._settings.schedule_policy
        bound = None if policy == "priority" else self._settings.max_overtakes
        self._lines[name] = Line(order_factory(policy, self._kv.page_size), bound)
        if self._counters is not None:
            self._counters.join(name)

    def _close(self, req: Req) -> None:
        """Forget a request that its line has removed, and the line if it is empty."""
        waiter = self._waiters.pop(req.rid)
        if self._index is not None:
            self._index.drop(req)
        if waiter.prefix:
            self._prefixes[waiter.prefix] -= 1
            if not self._prefixes[waiter.prefix]:
                del self._prefixes[waiter.prefix]
        name = self._line_name(req)
        line = self._lines[name]
        part = (req.lora_id, waiter.group)
        if self._turns is not None and part not in line.parts:
            self._turns.leave(name, part)
        if not line.parts:
            del self._lines[name]
            if self._counters is not None:
                self._counters.leave(name)

    # -- candidates of a step

    def candidates(
        self, now: int, extending: Iterable[Req], lacks_slot: LacksSlot
    ) -> Iterator[Req]:
        """Yield requests that may start, best first, until the pool must be held for one of them.

        The caller admits a candidate (`start`) or finds that it does not fit before it asks for the
        next. `now`: tokens computed so far. `extending`: requests with a prompt chunk in this step
        or a launched one. Requests that lack an adapter slot or wait for a prefix are skipped.
        """
        self._refresh()
        self._step += 1
        leaders = PrefixLeaders(self._group_tokens, self._kv.page_size)
        for req in extending:
            leaders.add(req)
        lookahead = Lookahead(self._settings.max_skips, self._settings.lookahead)
        passed: Counter[bytes] = Counter()
        gate = Gate(lacks_slot)
        for waiter in self._in_order(now, gate):
            req = waiter.req
            # An overdue or retracted request is not held for a prefix, and none may overtake it.
            urgent = req.retractions > 0 or self._lines[self._line_name(req)].is_overdue(req)
            held_from = None if urgent else leaders.held_from(req)
            if held_from is not None:
                passed[waiter.group] += 1
                if held_from == 0 or passed[waiter.group] >= _MAX_PASSED_OVER:
                    gate.shut_group(waiter.group)  # 0: the leader computes the whole group's prefix
                else:
                    waiter.try_next_of_group()
                continue
            yield req
            if req.rid in self._waiters:
                waiter.try_next_of_group()
                if not lookahead.did_not_fit(req, urgent=urgent):
                    return
            else:
                leaders.add(req)
                if not lookahead.started():
                    return

    def _refresh(self) -> None:
        if self._index is not None:
            for req in self._index.take_stale():
                line = self._lines[self._line_name(req)]
                line.move(self._waiters[req.rid], self._index.file(req))

    def _in_order(self, now: int, gate: Gate) -> Iterator[Waiter]:
        """Yield each waiting request at most once; not those retracted in this step."""
        if self._turns is None:
            if (line := self._lines.get("")) is not None:
                line.begin(self._step, now)
                while (waiter := line.next(gate)) is not None:
                    yield waiter
            return
        self._turns.begin()
        while (name := self._turns.next(gate)) is not None:
            line = self._lines[name]
            line.begin(self._step, now)
            if (waiter := line.next(gate)) is not None:
                yield waiter
            else:
                self._turns.pass_by(name)

    def _turn_of(self, name: str) -> tuple[float, int]:
        assert self._counters is not None
        return self._counters[name], self._lines[name].oldest.arrival
