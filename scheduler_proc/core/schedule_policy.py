"""The orders in which waiting requests are taken, one a policy; ties always by arrival.

Made by core/waiting_queue.py, which tells an order of every request that comes, goes or has another
match than before. An iteration is over a copy: requests may come and go meanwhile. PURE.
"""

import bisect
import heapq
import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Protocol

from ...wire.scheduling_config import SchedulePolicy
from .radix_cache import Match, TreeNode
from .req import Req

MATCH_POLICIES = frozenset({"lpm", "dfs-weight", "hrrn"})  # their order follows the prefix cache
_LONGEST_ANSWER = 4096  # hrrn takes no answer for longer, whatever limit it has
_CLASSES_PER_OCTAVE = 8  # how finely hrrn tells service times apart: to 9 %
_by_arrival = attrgetter("arrival")


class Order(Protocol):
    def add(self, req: Req, match: Match | None) -> None:
        """`match` is given for MATCH_POLICIES."""

    def remove(self, req: Req) -> None: ...

    def in_order(self, now: int) -> Iterator[Req]:
        """`now` is the clock of Req.arrived_at: tokens computed so far."""


def make_order(policy: SchedulePolicy, page_size: int) -> Order:
    match policy:
        case "fcfs":
            return Sorted(_fcfs)
        case "lpm":
            return Sorted(_longest_prefix_match)
        case "priority":
            return Sorted(_priority)
        case "hrrn":
            return HighestResponseRatio(page_size)
        case "dfs-weight":
            return DepthFirst()


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
    """By a rank that changes only when the request is added anew, smallest first."""

    def __init__(self, rank: Callable[[Req, Match | None], int]) -> None:
        self._rank = rank
        self._entries: list[tuple[int, int, Req]] = []
        self._ranks: dict[int, int] = {}

    def add(self, req: Req, match: Match | None) -> None:
        rank = self._ranks[req.rid] = self._rank(req, match)
        bisect.insort(self._entries, (rank, req.arrival, req))

    def remove(self, req: Req) -> None:
        key = (self._ranks.pop(req.rid), req.arrival)
        index = bisect.bisect_left(self._entries, key)
        assert self._entries[index][2] is req
        del self._entries[index]

    def in_order(self, now: int) -> Iterator[Req]:
        return (req for _, _, req in list(self._entries))


class HighestResponseRatio:
    """The largest (wait + service) / service goes first, all in tokens that must be computed.

    Service times are rounded to classes. Within one the longest wait has the highest ratio, so a
    pass compares the heads of the classes, not all requests. There are fewer than 200 of them, so
    empty ones may stay.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._classes: dict[int, Sorted] = {}
        self._class_of: dict[int, int] = {}

    def add(self, req: Req, match: Match | None) -> None:
        assert match is not None
        uncached = len(req.ids) - match.num_pages * self._page_size
        service = uncached + min(req.tokens_left, _LONGEST_ANSWER)
        number = self._class_of[req.rid] = round(_CLASSES_PER_OCTAVE * math.log2(service))
        self._classes.setdefault(number, Sorted(_fcfs)).add(req, None)

    def remove(self, req: Req) -> None:
        self._classes[self._class_of.pop(req.rid)].remove(req)

    def in_order(self, now: int) -> Iterator[Req]:
        def slowest_first(req: Req) -> tuple[float, int]:
            service = 2 ** (self._class_of.get(req.rid, 0) / _CLASSES_PER_OCTAVE)
            return -(now - req.arrived_at) / service, req.arrival

        return heapq.merge(
            *(one.in_order(now) for one in self._classes.values()), key=slowest_first
        )


class DepthFirst:
    """A walk through the prefix tree, to where most wait first, those deepest there, then upwards.

    Requests that share a prefix follow each other, so that it stays in the cache for them. So the
    walk of the next step goes on where the last one has ended, though more may wait elsewhere now.
    """

    def __init__(self) -> None:
        self._at: dict[int, tuple[TreeNode, dict[int, Req]]] = {}  # where their matches end
        self._node_of: dict[int, int] = {}
        self._last: TreeNode | None = None  # where the walk was

    def add(self, req: Req, match: Match | None) -> None:
        assert match is not None
        self._node_of[req.rid] = match.node.uid
        self._at.setdefault(match.node.uid, (match.node, {}))[1][req.rid] = req

    def remove(self, req: Req) -> None:
        uid = self._node_of.pop(req.rid)
        here = self._at[uid][1]
        del here[req.rid]
        if not here:
            del self._at[uid]

    def in_order(self, now: int) -> Iterator[Req]:
        weights, below = self._weigh()
        path: set[int] = set()
        step = self._last
        while step is not None:
            path.add(step.uid)
            step = step.parent

        def here_then_heaviest(uid: int) -> tuple[bool, int]:
            return uid in path, weights[uid]

        todo = [(0, False)]
        while todo:
            uid, children_done = todo.pop()
            children = below.get(uid)
            if children and not children_done:
                todo.append((uid, True))
                # Of equally heavy subtrees, the one in which somebody waits for longer comes first.
                children.sort(key=here_then_heaviest, reverse=True)
                todo += [(child, False) for child in reversed(children)]
            elif uid in self._at:
                self._last, reqs = self._at[uid]
                yield from sorted(reqs.values(), key=_by_arrival)

    def _weigh(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """How many wait at or under each node; and the nodes below each one that have any.

        Counts travel up one level at a time, merged where paths meet. A node that the tree has
        dropped hangs on the root (0) until its requests have been looked up again.
        """
        weights: dict[int, int] = {}
        below: dict[int, list[int]] = {}
        wave = {uid: (node, len(here)) for uid, (node, here) in self._at.items()}
        while wave:
            above: dict[int, tuple[TreeNode, int]] = {}
            for uid, (node, count) in wave.items():
                known = weights.get(uid)
                weights[uid] = count + (known or 0)
                parent = node.parent
                if parent is not None:
                    if known is None:
                        below.setdefault(parent.uid, []).append(uid)
                    above[parent.uid] = (parent, above.get(parent.uid, (parent, 0))[1] + count)
                elif uid and known is None:
                    below.setdefault(0, []).append(uid)
            wave = above
        return weights, below
