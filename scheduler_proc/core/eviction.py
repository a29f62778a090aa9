"""EvictionOrder: the order in which unlocked leaves of the prefix tree are evicted.

One heap, and one small key per policy. The heap deletes lazily: an entry counts only while it is
its leaf's latest and the leaf is evictable. A key's inputs change only while the leaf is locked or
by eviction itself, and after both the leaf is pushed again. Taking k of n leaves costs O(k log n).
Used by core/radix_cache.py. PURE.
"""

import heapq
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from ...wire.scheduling_config import EvictionPolicy


class Leaf(Protocol):
    start: int  # pages above it
    pages: list[int]
    created: int
    last_use: int
    hits: int
    priority: int
    clock: float
    pushed: int

    def is_evictable_leaf(self) -> bool: ...


L = TypeVar("L", bound=Leaf)
Key = tuple[float, float]
_SLACK = 64

# Context length at which a token's attention costs as much work as its weights: six times the model
# width (12 L d^2 for weights, 2 L d for each token attended to), here for a width of some 700.
EQUAL_COST_TOKENS = 4096


def _lru(leaf: Leaf) -> Key:
    """The least recently used goes first."""
    return (leaf.last_use, 0)


def _lfu(leaf: Leaf) -> Key:
    """The leaf hit by the fewest requests goes first, of equals the least recently used."""
    return (leaf.hits, leaf.last_use)


def _slru(leaf: Leaf) -> Key:
    """Leaves never hit go before leaves that were hit, both by last use."""
    return (leaf.hits > 0, leaf.last_use)


def _fifo(leaf: Leaf) -> Key:
    """The oldest leaf goes first."""
    return (leaf.created, 0)


def _priority(leaf: Leaf) -> Key:
    """The lowest priority goes first, of equals the least recently used."""
    return (leaf.priority, leaf.last_use)


def _cost(leaf: Leaf, page_size: int) -> Key:
    """The cheapest to recompute goes first; each eviction ages all unused leaves (GreedyDual)."""
    context = (leaf.start + len(leaf.pages)) * page_size
    return (leaf.clock + 1 + context / EQUAL_COST_TOKENS, leaf.last_use)


def _key_of(policy: EvictionPolicy, page_size: int) -> Callable[[Leaf], Key]:
    keys: dict[EvictionPolicy, Callable[[Leaf], Key]] = {
        "lru": _lru,
        "lfu": _lfu,
        "slru": _slru,
        "fifo": _fifo,
        "priority": _priority,
        "cost": partial(_cost, page_size=page_size),
    }
    return keys[policy]


class EvictionOrder(Generic[L]):
    """`clock` is GreedyDual's: the largest key evicted so far. Only the `cost` key reads it."""

    def __init__(self, policy: EvictionPolicy, page_size: int) -> None:
        self._key = _key_of(policy, page_size)
        self._heap: list[tuple[float, float, int, L]] = []  # key, push, leaf
        self._limit = _SLACK
        self._pushes = 0  # breaks ties, so that leaves themselves are never compared
        self.clock = 0.0

    def push(self, leaf: L) -> None:
        """Add a node that has become an evictable leaf, or again when such a leaf has changed."""
        self._pushes += 1
        leaf.pushed = self._pushes
        heapq.heappush(self._heap, (*self._key(leaf), self._pushes, leaf))
        if len(self._heap) > self._limit:
            self._compact()

    def pop(self) -> L | None:
        """Pop the next leaf to evict; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _counts(entry):
                self.clock = max(self.clock, entry[0])
                return entry[3]
        return None

    def clear(self) -> None:
        self._heap, self._limit = [], _SLACK

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def live(self, start: int, stop: int) -> int:
        """How many of a slice of entries are not stale, for conservation checks."""
        return sum(map(_counts, self._heap[start:stop]))

    def _compact(self) -> None:
        """Drop stale entries; the next compaction comes after as many pushes as entries remain."""
        self._heap = list(filter(_counts, self._heap))
        heapq.heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK


def _counts(entry: tuple[float, float, int, L]) -> bool:
    _, _, push, leaf = entry
    return push == leaf.pushed and leaf.is_evictable_leaf()
