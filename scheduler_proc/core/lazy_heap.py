"""LazyHeap: a heap from which any entry can be removed, in amortised logarithmic time. PURE.

A removed entry is only marked; it leaves when it comes to the top, or when more than half of the
heap is marked.
"""

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, ...]
_SLACK = 16  # removed entries that a small heap may hold


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    key: Key
    item: T
    live: bool = True
    inside: bool = True  # False while popped


class LazyHeap(Generic[T]):
    __slots__ = ("_heap", "_live", "_pushes")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Entry[T]]] = []
        self._live = 0
        self._pushes = 0  # breaks ties: of equal keys the first pushed goes first

    def __len__(self) -> int:
        return self._live

    def push(self, key: Key, item: T) -> Entry[T]:
        entry = Entry(key, item)
        self.put_back(entry)
        return entry

    def put_back(self, entry: Entry[T]) -> None:
        """Insert a popped entry again, under its present key."""
        entry.inside = True
        self._pushes += 1
        self._live += 1
        heapq.heappush(self._heap, (entry.key, self._pushes, entry))

    def remove(self, entry: Entry[T]) -> None:
        """Remove an entry, popped or not."""
        assert entry.live
        entry.live = False
        if entry.inside:
            self._live -= 1
            if len(self._heap) > 2 * self._live + _SLACK:
                self._heap = [one for one in self._heap if one[2].live]
                heapq.heapify(self._heap)

    def peek(self) -> Entry[T] | None:
        """The live entry with the smallest key, or None."""
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> Entry[T]:
        """Pop the smallest entry. It stays live: put it back or remove it."""
        entry = self.peek()
        assert entry is not None, "nothing to pop"
        heapq.heappop(self._heap)
        entry.inside = False
        self._live -= 1
        return entry
