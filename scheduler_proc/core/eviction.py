"""Which unlocked leaf of the prefix tree goes first: the least recently used.

A heap with lazy deletion: an entry counts only while its leaf is still evictable and unused since.
Taking k of n leaves costs O(k log n), never a walk of the tree. Used by core/radix_cache.py. PURE.
"""

import heapq
from typing import Generic, Protocol, TypeVar


class Leaf(Protocol):
    uid: int
    last_use: int

    def is_evictable_leaf(self) -> bool: ...


L = TypeVar("L", bound=Leaf)
_SLACK = 64


class LRUOrder(Generic[L]):
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, L]] = []
        self._limit = _SLACK
        self._pushes = 0  # ties break by it, so that leaves themselves are never compared

    def push(self, leaf: L) -> None:
        """Call whenever a node becomes an evictable leaf, and when one has been used."""
        self._pushes += 1
        heapq.heappush(self._heap, (leaf.last_use, self._pushes, leaf))
        if len(self._heap) > self._limit:
            self._compact()

    def pop(self) -> L | None:
        """The next leaf to evict, taken out of the order; None if there is none."""
        while self._heap:
            last_use, _, leaf = heapq.heappop(self._heap)
            if last_use == leaf.last_use and leaf.is_evictable_leaf():
                return leaf
        return None

    def _compact(self) -> None:
        """Drop stale entries; the next time comes after as many pushes as entries are left."""
        live = {
            leaf.uid: (last_use, push, leaf)
            for last_use, push, leaf in self._heap
            if last_use == leaf.last_use and leaf.is_evictable_leaf()
        }
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK
