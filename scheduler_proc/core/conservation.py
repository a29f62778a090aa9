"""The laws of page ownership, checked from scratch: after every event in tests, else when idle.

Free pages, tree pages and pages owned by requests are disjoint and sum to the pool; a tree node is
locked exactly by the requests whose prefix runs through it, and holds their ids in their namespace;
every unlocked leaf can be evicted; every row is free or held once. PURE.
"""

from collections import Counter
from collections.abc import Iterable

from .kv_cache import KVCache
from .radix_cache import ID_BYTES, TreeNode
from .req import Req


class ConservationError(AssertionError):
    """A bug: the message says which law is broken."""


def check_conservation(kv: KVCache, running: Iterable[Req]) -> None:
    """Raises ConservationError. Costs a walk over the tree and the pool."""
    reqs = list(running)
    nodes = kv.tree.nodes()
    _check_pages(kv, nodes, reqs)
    _check_nodes(kv, nodes)
    _check_locks(kv, nodes, reqs)
    _check_rows(kv, reqs)


def _require(holds: bool, law: str) -> None:
    if not holds:
        raise ConservationError(law)


def _check_pages(kv: KVCache, nodes: list[TreeNode], reqs: list[Req]) -> None:
    owners = Counter(kv.pages.free_numbers())
    for node in nodes:
        owners.update(node.pages)
    for req in reqs:
        assert req.kv is not None
        owners.update(req.kv.pages[req.kv.tree_pages :])
    shared = [page for page, count in owners.items() if count != 1]
    _require(not shared, f"pages with more than one owner: {shared[:8]}")
    expected = set(range(1, kv.pages.capacity + 1))
    _require(set(owners) == expected, f"lost pages: {sorted(expected - set(owners))[:8]}")


def _check_nodes(kv: KVCache, nodes: list[TreeNode]) -> None:
    page_bytes = kv.page_size * ID_BYTES
    for node in nodes:
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
    evictable = sum(len(node.pages) for node in nodes if not node.lock_count)
    locked = sum(len(node.pages) for node in nodes if node.lock_count)
    _require(evictable == kv.tree.evictable_pages, "evictable pages are miscounted")
    _require(locked == kv.tree.locked_pages, "locked pages are miscounted")
    _require(len(nodes) == kv.tree.num_nodes, "nodes are miscounted")
    leaves = sum(node.is_evictable_leaf() for node in nodes)
    _require(leaves == kv.tree.leaves_in_order(), "an unlocked leaf is not up for eviction")


def _check_locks(kv: KVCache, nodes: list[TreeNode], reqs: list[Req]) -> None:
    locks: Counter[int] = Counter()
    for req in reqs:
        assert req.kv is not None
        pages: list[int] = []
        key, namespace = b"", req.namespace.encode()
        node = req.kv.node
        while node.parent is not None:
            locks[node.uid] += 1
            pages = node.pages + pages
            key = node.key + key
            namespace = node.edge[: -kv.page_size * ID_BYTES]
            node = node.parent
        held = req.kv.pages[: req.kv.tree_pages]
        _require(pages == held, f"request {req.rid} and its tree path disagree on pages")
        ids = req.ids[: req.kv.tree_pages * kv.page_size].tobytes()
        _require(key == ids, f"request {req.rid} and its tree path disagree on ids")
        _require(namespace == req.namespace.encode(), f"request {req.rid} reads another namespace")
    for node in nodes:
        _require(node.lock_count == locks[node.uid], f"node {node.uid}: locks are miscounted")


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
