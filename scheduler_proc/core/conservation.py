"""Invariants of page ownership, checked from scratch: after every event in tests, else when idle.

Free pages, tree pages and pages owned by requests are disjoint and sum to the pool; a tree node is
locked exactly by the requests whose prefix runs through it, and holds their ids in their namespace;
every unlocked leaf can be evicted; every row is free or held once. `audit` checks them in slices,
so that a large pool does not keep the loop from its mailbox. PURE.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from .kv_cache import KVCache
from .radix_cache import ID_BYTES, TreeNode
from .req import Req
from .totals import Totals

SLICE = 4096  # pages, nodes and heap entries that an audit checks between two yields


class ConservationError(AssertionError):
    """A bug: the message names the broken invariant."""


def check_conservation(kv: KVCache, running: Iterable[Req]) -> None:
    """Raise ConservationError if an invariant is broken. Walks the whole tree and pool."""
    for _ in audit(kv, running):
        pass


def audit(kv: KVCache, running: Iterable[Req], size: int = SLICE) -> Iterator[int]:
    """Check a slice per `next`, and yield how many entries it checked: at most twice `size`.

    Nothing may change between two slices. Raises ConservationError.
    """
    looked = 0
    for part in _check_parts(kv, list(running), size):
        looked += part
        if looked >= size:
            yield looked
            looked = 0


def _check_parts(kv: KVCache, reqs: list[Req], size: int) -> Iterator[int]:
    """Check in parts of at most `size` + 1 entries; yield the number after each part."""
    owners = _Owners(kv)
    for start in range(0, kv.pages.available, size):
        part = kv.pages.free_numbers(start, start + size)
        owners.add(part)
        yield len(part)
    yield from _check_tree(kv, owners, _locks(reqs), size)
    for req in reqs:
        assert req.kv is not None
        owners.add(req.kv.pages[req.kv.tree_pages :])
    owners.check()
    _check_paths(kv, reqs)
    _check_rows(kv, reqs)


def _require(holds: bool, law: str) -> None:
    if not holds:
        raise ConservationError(law)


class _Owners:
    """Which pages have an owner; `add` raises ConservationError for a page with two."""

    def __init__(self, kv: KVCache) -> None:
        self._capacity = kv.pages.capacity
        self._owned = bytearray(self._capacity + 1)

    def add(self, pages: list[int]) -> None:
        owned = self._owned
        for page in pages:
            if not 0 < page <= self._capacity:
                raise ConservationError(f"page {page} is outside the pool")
            if owned[page]:
                raise ConservationError(f"page {page} has more than one owner")
            owned[page] = 1

    def check(self) -> None:
        if self._owned.count(1) < self._capacity:
            lost = [page for page, owned in enumerate(self._owned) if page and not owned]
            raise ConservationError(f"lost pages: {lost[:8]}")


def _check_tree(kv: KVCache, owners: _Owners, locks: Counter[int], size: int) -> Iterator[int]:
    nodes = leaves = 0
    pages = [0, 0]  # evictable, locked
    for node in kv.tree.walk():
        _check_node(kv, node)
        _require(node.lock_count == locks[node.uid], f"node {node.uid}: locks are miscounted")
        nodes += 1
        leaves += node.is_evictable_leaf()
        pages[node.lock_count > 0] += len(node.pages)
        for start in range(0, len(node.pages), size):
            part = node.pages[start : start + size]
            owners.add(part)
            yield len(part) + 1
    _require(pages[0] == kv.tree.evictable_pages, "evictable pages are miscounted")
    _require(pages[1] == kv.tree.locked_pages, "locked pages are miscounted")
    _require(nodes == kv.tree.num_nodes, "nodes are miscounted")
    in_order = 0
    for start in range(0, kv.tree.order_length, size):
        in_order += kv.tree.leaves_in_order(start, start + size)
        yield size
    _require(leaves == in_order, "an unlocked leaf is not up for eviction")


def _check_node(kv: KVCache, node: TreeNode) -> None:
    page_bytes = kv.page_size * ID_BYTES
    _require(len(node.key) == len(node.pages) * page_bytes, f"node {node.uid}: key and pages")
    _require(bool(node.pages), f"node {node.uid} is empty")
    parent = node.parent
    _require(
        parent is not None and parent.children.get(node.edge) is node,
        f"node {node.uid} is not its parent's child",
    )
    assert parent is not None
    at_root = parent is kv.tree.root
    edge = node.edge[-page_bytes:] if at_root else node.edge
    _require(edge == node.key[:page_bytes], f"node {node.uid}: edge and key")
    above = parent.start + len(parent.pages)
    _require(node.start == above, f"node {node.uid}: pages above are miscounted")


def _locks(reqs: list[Req]) -> Counter[int]:
    """The number of requests that lock each node, by its uid."""
    locks: Counter[int] = Counter()
    for req in reqs:
        assert req.kv is not None
        node = req.kv.node
        while node.parent is not None:
            locks[node.uid] += 1
            node = node.parent
    return locks


def _check_paths(kv: KVCache, reqs: list[Req]) -> None:
    for req in reqs:
        assert req.kv is not None
        pages: list[int] = []
        key, namespace = b"", req.namespace.encode()
        node = req.kv.node
        while node.parent is not None:
            pages = node.pages + pages
            key = node.key + key
            namespace = node.edge[: -kv.page_size * ID_BYTES]
            node = node.parent
        held = req.kv.pages[: req.kv.tree_pages]
        _require(pages == held, f"request {req.rid} and its tree path disagree on pages")
        ids = req.ids[: req.kv.tree_pages * kv.page_size].tobytes()
        _require(key == ids, f"request {req.rid} and its tree path disagree on ids")
        _require(namespace == req.namespace.encode(), f"request {req.rid} reads another namespace")


def _check_rows(kv: KVCache, reqs: list[Req]) -> None:
    for req in reqs:
        assert req.kv is not None
        _require(
            len(req.kv.pages) >= kv.pages_for(req.kv.computed),
            f"request {req.rid} has more computed tokens than pages",
        )
        in_order = req.kv.landed <= req.kv.computed <= len(req.ids) + 1
        _require(in_order, f"request {req.rid}: landed, computed and known tokens disagree")
    rows = [req.kv.row for req in reqs if req.kv is not None] + kv.rows.free_numbers()
    _require(sorted(rows) == list(range(kv.rows.capacity)), "rows are lost or held twice")


class IdleAudit:
    """The audit of an idle scheduler, one slice per call."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._version = -1  # KVCache.version that `_slices` checks
        self._slices: Iterator[int] = iter(())
        self.size = SLICE  # entries per slice
        self.under_way = False
        self.looked_at = 0  # entries that the last slice checked

    def go_on(self, totals: Totals, report: Callable[[str], None]) -> bool:
        """Check the next slice; False when all is checked. Starts again only once a request has run
        or the cache was flushed.

        A broken invariant is counted and reported, and the server goes on.
        """
        if self._version != self._kv.version:
            self._version, self._slices = self._kv.version, audit(self._kv, (), self.size)
        try:
            self.looked_at = next(self._slices, 0)
        except AssertionError as error:
            self.looked_at = 0
            totals.violations += 1
            report(str(error))
        self.under_way = self.looked_at > 0
        return self.under_way
