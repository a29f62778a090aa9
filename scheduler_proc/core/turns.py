"""Turns: the next tenant among those with a request that the step may start. PURE.

Owned by core/waiting_queue.py with --fairness vtc. Tenants are kept by adapter and prefix group, so
that a step skips at once all that wait only for a taken slot or for a prefix being computed.
"""

from collections.abc import Callable

from .lazy_heap import Entry, Key, LazyHeap
from .line import Gate

Part = tuple[int, bytes]  # adapter, prefix group


class Turns:
    """A heap of tenants per part, and a heap of parts. Keys may be stale: they only grow, so it
    suffices to renew the smallest.
    """

    def __init__(self, key_of: Callable[[str], Key]) -> None:
        """`key_of`: a waiting tenant's key, smallest first; it must not fall while it waits."""
        self._key_of = key_of
        self._parts: dict[Part, LazyHeap[str]] = {}
        self._entries: dict[tuple[str, Part], Entry[str]] = {}
        self._tops: LazyHeap[Part] = LazyHeap()  # keys are at most the part's smallest key
        self._tops_of: dict[Part, Entry[Part]] = {}
        self._aside: list[tuple[Part, Entry[str]]] = []  # popped for the rest of this step
        self._parts_aside: list[Entry[Part]] = []
        self._done: set[str] = set()

    def join(self, tenant: str, part: Part) -> None:
        """Add a tenant that now has a request in the part, and had none."""
        key = self._key_of(tenant)
        if part not in self._parts:
            self._parts[part] = LazyHeap()
            self._tops_of[part] = self._tops.push(key, part)
        elif key < self._tops_of[part].key:
            self._lower(part, key)
        self._entries[tenant, part] = self._parts[part].push(key, tenant)

    def _lower(self, part: Part, key: Key) -> None:
        top = self._tops_of[part]
        if top.inside:
            self._tops.remove(top)
            self._tops_of[part] = self._tops.push(key, part)
        else:
            top.key = key

    def leave(self, tenant: str, part: Part) -> None:
        """Remove a tenant that no longer has a request in the part."""
        self._parts[part].remove(self._entries.pop((tenant, part)))

    def begin(self) -> None:
        """Begin a step: all tenants and parts may be tried again."""
        for part, entry in self._aside:
            if entry.live:
                self._parts[part].put_back(entry)
        for top in self._parts_aside:
            if len(self._parts[top.item]):
                self._tops.put_back(top)
            else:
                self._tops.remove(top)
                del self._parts[top.item], self._tops_of[top.item]
        self._aside.clear()
        self._parts_aside.clear()
        self._done.clear()

    def pass_by(self, tenant: str) -> None:
        """Skip the tenant for the rest of this step."""
        self._done.add(tenant)

    def next(self, gate: Gate) -> str | None:
        while (top := self._tops.peek()) is not None:
            adapter, group = part = top.item
            shut = adapter in gate.shut_adapters or group in gate.shut_groups
            first = None if shut else self._first(part)
            if first is None:
                self._parts_aside.append(self._tops.pop())
            elif top.key < first.key:
                self._tops.pop()
                top.key = first.key
                self._tops.put_back(top)
            else:
                return first.item
        return None

    def _first(self, part: Part) -> Entry[str] | None:
        """The entry of the part's next tenant, with its key renewed."""
        heap = self._parts[part]
        while (entry := heap.peek()) is not None:
            if entry.item in self._done:
                self._aside.append((part, heap.pop()))
            elif entry.key < (key := self._key_of(entry.item)):
                heap.pop()
                entry.key = key
                heap.put_back(entry)
            else:
                return entry
        return None
