"""Lane: a priority queue of waiting requests from which a step takes the best ones. PURE.

Used by core/schedule_policy.py. Requests that share a prompt prefix form a group. Only the first of
a group is in the lane's front heap; the next one joins it when the first has left, or when
`open_next` lets the step try another. So a step can pass over a whole group at the price of one
request.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .lazy_heap import Entry, Key, LazyHeap
from .req import Req


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting request and its entries in the queue's heaps."""

    req: Req
    prefix: bytes = b""  # digest of the prompt's first tokens, empty if the prompt is too short
    group: bytes = b""  # `prefix` if others with this prefix waited when it was added, else empty
    added: int = 0  # the last step planned before it was added
    tried: int = -1  # the step that tried it last
    by_age: "Entry[Waiter] | None" = None
    by_rank: "Entry[Waiter] | None" = None
    heap: "LazyHeap[Waiter] | None" = None  # the heap that holds `by_rank`
    lane: "Lane | None" = None

    def try_next_of_group(self) -> None:
        """Let the step try the next request of this one's group, after this one did not start."""
        assert self.lane is not None
        self.lane.open_next(self)


class Source(Protocol):
    """Waiting requests that a step takes one by one, smallest key first."""

    def peek(self) -> tuple[Key, Waiter] | None:
        """The next request with its key; keys of several sources can be compared."""

    def take(self) -> Waiter:
        """Take the next request. It stays queued, but is not offered again in this step."""


@dataclass(slots=True, eq=False)
class _Group:
    """A group's hidden requests: no key in `rest` is smaller than `last`, the front's largest."""

    rest: LazyHeap[Waiter] = field(default_factory=LazyHeap)
    in_front: int = 0
    last: Key = ()


class Lane:
    __slots__ = ("_front", "_groups", "_size", "_taken")

    def __init__(self) -> None:
        self._front: LazyHeap[Waiter] = LazyHeap()
        self._groups: dict[bytes, _Group] = {}
        self._taken: list[Entry[Waiter]] = []  # entries popped in this step
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiter: Waiter, key: Key) -> None:
        heap = self._front
        if waiter.group:
            group = self._groups.setdefault(waiter.group, _Group())
            if group.in_front and key > group.last:
                heap = group.rest
            else:
                group.last = max(group.last, key) if group.in_front else key
                group.in_front += 1
        self._size += 1
        waiter.lane, waiter.heap, waiter.by_rank = self, heap, heap.push(key, waiter)

    def remove(self, waiter: Waiter) -> None:
        assert waiter.heap is not None
        assert waiter.by_rank is not None
        waiter.heap.remove(waiter.by_rank)
        self._size -= 1
        if waiter.group:
            group = self._groups[waiter.group]
            if waiter.heap is self._front:
                group.in_front -= 1
                if not group.in_front and not self._open(group):
                    del self._groups[waiter.group]
        waiter.lane = waiter.heap = waiter.by_rank = None

    def begin(self) -> None:
        """Begin a step: requests that the last step took but did not start may be taken again."""
        for entry in self._taken:
            if entry.live:
                self._front.put_back(entry)
        self._taken.clear()

    def peek(self) -> tuple[Key, Waiter] | None:
        entry = self._front.peek()
        return None if entry is None else (entry.key, entry.item)

    def take(self) -> Waiter:
        entry = self._front.pop()
        self._taken.append(entry)
        return entry.item

    def open_next(self, waiter: Waiter) -> None:
        """Let this step take the next request of the waiter's group as well."""
        if waiter.group:
            self._open(self._groups[waiter.group])

    def _open(self, group: _Group) -> bool:
        """Move the best of `rest` to the front; False if `rest` is empty."""
        if not len(group.rest):
            return False
        entry = group.rest.pop()
        entry.item.heap = self._front
        self._front.put_back(entry)
        group.in_front += 1
        group.last = entry.key
        return True


class Merge:
    """The requests of several sources in one order, smallest key first, during one step."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._heap: list[tuple[Key, int, Waiter, Source]] = []
        self._last: Source | None = None  # the last one taken from: peeked again when needed
        self._pushes = 0
        for source in sources:
            self._push(source)

    def peek(self) -> tuple[Key, Waiter] | None:
        if self._last is not None:
            self._push(self._last)
            self._last = None
        while self._heap:
            key, _, waiter, source = self._heap[0]
            if waiter.lane is not None:
                return key, waiter
            heapq.heappop(self._heap)  # it has started meanwhile, as an overdue request
            self._push(source)
        return None

    def take(self) -> Waiter:
        """Take the request that `peek` has just returned."""
        source = self._last = heapq.heappop(self._heap)[3]
        return source.take()

    def leave(self) -> None:
        """Drop the source of the request that `peek` has just returned for the rest of the step."""
        heapq.heappop(self._heap)

    def _push(self, source: Source) -> None:
        if (found := source.peek()) is not None:
            self._pushes += 1
            heapq.heappush(self._heap, (found[0], self._pushes, found[1], source))
