"""The order in which waiting requests are tried, one class per policy; ties go by arrival. PURE.

core/line.py has an order for each adapter and tells it when a request comes, goes or has a new
match. An order keeps its requests in heaps, so that nothing is copied or sorted for a step: a step
costs what it tries, and under hrrn one comparison for each class of service times.
"""

import math
from collections.abc import Callable
from typing import Protocol

from ...wire.scheduling_config import SchedulePolicy
from .depth_first import DepthFirst, Trail
from .lane import Lane, Merge, Waiter
from .lazy_heap import Key
from .radix_cache import Match
from .req import Req

MATCH_POLICIES = frozenset({"lpm", "dfs-weight", "hrrn"})  # their order depends on cached prefixes
_LONGEST_ANSWER = 4096  # tokens; hrrn expects no longer answer, whatever its limit
_CLASSES_PER_OCTAVE = 8  # how finely hrrn tells service times apart: to 9 %


class Order(Protocol):
    """A Source (core/lane.py) to which requests are added; each step calls `begin` first."""

    def __len__(self) -> int: ...

    def add(self, waiter: Waiter, match: Match | None) -> None:
        """Add a request; `match` is its cached prefix under MATCH_POLICIES, else None."""

    def remove(self, waiter: Waiter) -> None: ...

    def begin(self, now: int) -> None:
        """Begin a step. `now`: tokens computed so far, the clock of Req.arrived_at."""

    def peek(self) -> tuple[Key, Waiter] | None: ...

    def take(self) -> Waiter: ...


def order_factory(policy: SchedulePolicy, page_size: int) -> Callable[[], Order]:
    """A maker of the orders of one line, one per adapter; their keys can be compared."""
    match policy:
        case "fcfs":
            return lambda: Sorted(_fcfs)
        case "lpm":
            return lambda: Sorted(_longest_prefix_match)
        case "priority":
            return lambda: Sorted(_priority)
        case "hrrn":
            return lambda: HighestResponseRatio(page_size)
        case "dfs-weight":
            trail = Trail()
            return lambda: DepthFirst(trail)


def _fcfs(req: Req, match: Match | None) -> int:
    """First come, first served."""
    return 0


def _longest_prefix_match(req: Req, match: Match | None) -> int:
    """The longest cached prefix goes first."""
    assert match is not None
    return -match.num_pages


def _priority(req: Req, match: Match | None) -> int:
    """The largest priority goes first."""
    return -req.priority


class Sorted:
    """Order by a rank that is computed when a request is added, smallest first."""

    def __init__(self, rank: Callable[[Req, Match | None], int]) -> None:
        self._rank = rank
        self._lane = Lane()
        self.peek, self.take = self._lane.peek, self._lane.take

    def __len__(self) -> int:
        return len(self._lane)

    def add(self, waiter: Waiter, match: Match | None) -> None:
        self._lane.add(waiter, (self._rank(waiter.req, match), waiter.req.arrival))

    def remove(self, waiter: Waiter) -> None:
        self._lane.remove(waiter)

    def begin(self, now: int) -> None:
        self._lane.begin()


class _ServiceClass(Lane):
    """Requests of about the same service time, longest waiting first."""

    __slots__ = ("_service", "now")

    def __init__(self, service: float) -> None:
        super().__init__()
        self._service = service
        self.now = 0

    def peek(self) -> tuple[Key, Waiter] | None:
        if (found := super().peek()) is None:
            return None
        req = found[1].req
        return (-(self.now - req.arrived_at) / self._service, req.arrival), found[1]


class HighestResponseRatio:
    """The largest (wait + service) / service goes first, both in tokens computed.

    All ratios change all the time, but of two requests with the same service time the one that has
    waited longer stays ahead. Service times are rounded to fewer than 200 classes, so that a step
    compares only the heads of the classes.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._classes: dict[int, _ServiceClass] = {}
        self._size = 0
        self._merge = Merge(())

    def __len__(self) -> int:
        return self._size

    def add(self, waiter: Waiter, match: Match | None) -> None:
        assert match is not None
        req = waiter.req
        uncached = len(req.ids) - match.num_pages * self._page_size
        service = uncached + min(req.tokens_left, _LONGEST_ANSWER)
        number = round(_CLASSES_PER_OCTAVE * math.log2(service))
        if (lane := self._classes.get(number)) is None:
            lane = self._classes[number] = _ServiceClass(2 ** (number / _CLASSES_PER_OCTAVE))
        lane.add(waiter, (req.arrival,))
        self._size += 1

    def remove(self, waiter: Waiter) -> None:
        assert waiter.lane is not None
        waiter.lane.remove(waiter)
        self._size -= 1

    def begin(self, now: int) -> None:
        for lane in self._classes.values():
            lane.begin()
            lane.now = now
        self._merge = Merge(self._classes.values())

    def peek(self) -> tuple[Key, Waiter] | None:
        return self._merge.peek()

    def take(self) -> Waiter:
        return self._merge.take()
