"""RadixCache: a compressed trie over pages of token ids that maps prefixes to KV pages.

Owned by core/kv_cache.py, which alone changes it. Keys are the int32 bytes of whole pages of ids,
so that runs are compared as memory. Namespaces part at the root and share nothing. The tree owns
the pages in its nodes but never calls the allocator: the caller frees what `evict` returns. PURE.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ...wire.scheduling_config import EvictionPolicy
from .eviction import EvictionOrder
from .kv_events import KVEventLog

ID_BYTES = 4


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of pages below `parent`, locked by `lock_count` requests at this node or below."""

    uid: int
    edge: bytes  # its key in parent.children: its first page; at the root, namespace + first page
    key: bytes
    pages: list[int]
    parent: "TreeNode | None"
    start: int  # pages above it
    created: int  # tick
    priority: int  # the highest of the requests that used it
    hits: int = 0  # requests that matched it
    last_use: int = 0  # tick of the last unlock
    clock: float = 0.0  # the eviction order's clock at the last unlock
    pushed: int = 0  # number of its latest push to the eviction order
    lock_count: int = 0
    children: dict[bytes, "TreeNode"] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)  # ids of its pages, if events are recorded

    def is_evictable_leaf(self) -> bool:
        return not self.lock_count and not self.children and self.parent is not None


@dataclass(slots=True, frozen=True)
class Match:
    """The longest cached prefix of a key: it ends in `node`, maybe before that node's end."""

    node: TreeNode
    run: bytes  # the node's key object at lookup; every change of the run replaces it
    edge: bytes  # the child edge that would extend the match, empty where none could
    num_pages: int

    @property
    def is_fresh(self) -> bool:
        """Whether the match is still the longest: its end in the tree is unchanged."""
        return self.run is self.node.key and self.edge not in self.node.children

    @property
    def pages(self) -> list[int]:
        runs: list[list[int]] = []
        step: TreeNode | None = self.node
        while step is not None:
            runs.append(step.pages)
            step = step.parent
        return [page for run in reversed(runs) for page in run][: self.num_pages]


@dataclass(slots=True, frozen=True)
class Inserted:
    node: TreeNode  # where the inserted run ends
    pages: list[int]  # the tree's pages of the run
    duplicates: list[int]  # given pages whose content the tree already had: the caller frees them


class RadixCache:
    """`evictable_pages` and `locked_pages` sum to the pages in the tree."""

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy = "lru",
        events: KVEventLog | None = None,
    ) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._order: EvictionOrder[TreeNode] = EvictionOrder(policy, page_size)
        self._events = events
        self._tick = 0
        self._uids = 0
        self.root = TreeNode(0, b"", b"", [], None, start=0, created=0, priority=0)
        self.num_nodes = 0
        self.evictable_pages = 0
        self.locked_pages = 0
        self.evicted_total = 0  # pages, since the start
        # `watched`: uids of nodes whose changes are noted. `changed`: what changed at each since
        # the reader emptied it: the edges of runs added below it, or None if the node was cut.
        self.watched: Container[int] = ()
        self.changed: dict[int, set[bytes] | None] = {}

    def match(self, key: bytes, namespace: bytes = b"") -> Match:
        """The longest prefix of `key` in the tree; changes nothing."""
        page_bytes = self._page_bytes
        node, done = self.root, 0
        edge = namespace + key[:page_bytes] if key else b""
        while child := node.children.get(edge):
            node = child
            run = node.key
            if not key.startswith(run, done):
                done += self._common_bytes(run, key, done)
                edge = b""
                break
            done += len(run)
            edge = key[done : done + page_bytes]
        return Match(node, node.key, edge, done // page_bytes)

    def lock(self, match: Match, priority: int = 0) -> TreeNode:
        """Lock a fresh match against eviction until the returned node is unlocked.

        A match that ends inside a node splits it there.
        """
        assert match.is_fresh
        node = match.node
        if match.num_pages < node.start + len(node.pages):
            node = self._split(node, match.num_pages - node.start)
        step = node
        while step.parent is not None:
            self._use(step, priority)
            step = step.parent
        return node

    def unlocked_pages(self, match: Match) -> int:
        """The number of pages of a fresh match that no request locks."""
        node, end, count = match.node, match.num_pages, 0
        while node.parent is not None and not node.lock_count:
            count += end - node.start
            node, end = node.parent, node.start
        return count

    def insert(
        self,
        node: TreeNode,
        key: bytes,
        pages: list[int],
        namespace: bytes = b"",
        priority: int = 0,
    ) -> Inserted:
        """Add a run of whole pages below `node`, and move the caller's lock to the end of the run.

        The tree takes the pages, except the duplicates.
        """
        if node.lock_count == 1 and not node.hits and not node.children and key:
            self._extend(node, key, pages)
            return Inserted(node, pages, [])
        owned: list[int] = []
        done = 0
        edge = (b"" if node.parent else namespace) + key[: self._page_bytes]
        while done < len(key):
            child = node.children.get(edge)
            if child is None:
                child = self._attach(node, edge, key[done:], pages[len(owned) :], priority)
            else:
                common = self._common_bytes(child.key, key, done)
                if common < len(child.key):
                    child = self._split(child, common // self._page_bytes)
                self._use(child, priority)
            owned += child.pages
            done += len(child.key)
            edge = key[done : done + self._page_bytes]
            node = child
        if owned == pages:
            return Inserted(node, owned, [])
        duplicates = [page for page, kept in zip(pages, owned, strict=True) if page != kept]
        return Inserted(node, owned, duplicates)

    def unlock(self, node: TreeNode) -> None:
        """Unlock `node` and all above it; a node's last use is the end of its use, which is now."""
        self._tick += 1
        while (parent := node.parent) is not None:
            if node.lock_count <= 0:
                raise RuntimeError(f"tree node {node.uid} was unlocked more often than locked")
            node.lock_count -= 1
            if node.lock_count == 0:
                self.evictable_pages += len(node.pages)
                self.locked_pages -= len(node.pages)
                node.last_use, node.clock = self._tick, self._order.clock
                if not node.children:
                    self._order.push(node)
            node = parent

    def evict(self, count: int) -> list[int]:
        """Evict min(count, evictable) pages in the policy's order, and return them in that order.

        A long leaf loses only as many pages from its end as are needed.
        """
        evicted: list[int] = []
        hashes: list[int] = []
        while len(evicted) < count and (leaf := self._order.pop()):
            keep = max(0, len(leaf.pages) - (count - len(evicted)))
            evicted += reversed(leaf.pages[keep:])
            hashes += reversed(leaf.hashes[keep:])
            self._note_cut(leaf)
            if keep:
                del leaf.pages[keep:]
                del leaf.hashes[keep:]
                leaf.key = leaf.key[: keep * self._page_bytes]
                self._order.push(leaf)
            else:
                self._detach(leaf)
        self.evictable_pages -= len(evicted)
        self.evicted_total += len(evicted)
        if self._events is not None and hashes:
            self._events.removed(hashes)
        return evicted

    def clear(self) -> list[int]:
        """Drop all nodes and return their pages; raise RuntimeError if one is locked."""
        if self.locked_pages:
            raise RuntimeError(f"{self.locked_pages} pages of the tree are in use")
        pages: list[int] = []
        for node in self.nodes():
            pages += node.pages
            self._note_cut(node)
            node.parent, node.key, node.pages, node.children = None, b"", [], {}
        self.root.children = {}
        self._order.clear()
        self.num_nodes = self.evictable_pages = 0
        if self._events is not None:
            self._events.cleared()
        return pages

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root."""
        return list(self.walk())

    def walk(self) -> Iterator[TreeNode]:
        """Yield all nodes but the root. The tree may not change meanwhile."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    @property
    def order_length(self) -> int:
        return len(self._order)

    def leaves_in_order(self, start: int, stop: int) -> int:
        """How many of a slice of the eviction order are not stale, for conservation checks."""
        return self._order.live(start, stop)

    def _common_bytes(self, run: bytes, key: bytes, start: int) -> int:
        """Length of the common prefix of `run` and `key[start:]`, in bytes of whole pages; at least
        one page, the edge.
        """
        if key.startswith(run, start):
            return len(run)
        page_bytes = self._page_bytes
        low, high = 1, len(run) // page_bytes  # they agree on `low` pages and not on `high`
        while high - low > 1:
            middle = (low + high) // 2
            if key.startswith(
                run[low * page_bytes : middle * page_bytes], start + low * page_bytes
            ):
                low = middle
            else:
                high = middle
        return low * page_bytes

    def _split(self, node: TreeNode, count: int) -> TreeNode:
        """Split `node` after `count` pages and return the new upper part. `node` becomes the lower
        part, so that locks on it stay valid.

        The caller locks the upper part at once, so its last_use is set by the unlock.
        """
        parent = node.parent
        assert parent is not None
        cut = count * self._page_bytes
        upper = self._make(parent, node.edge, node.key[:cut], node.pages[:count], node.priority)
        upper.created, upper.hits, upper.lock_count = node.created, node.hits, node.lock_count
        upper.hashes = node.hashes[:count]
        node.key, node.pages, node.hashes = node.key[cut:], node.pages[count:], node.hashes[count:]
        node.edge, node.parent = node.key[: self._page_bytes], upper
        node.start += count
        self._note_cut(node)
        upper.children[node.edge] = node
        return upper

    def _attach(
        self, parent: TreeNode, edge: bytes, key: bytes, pages: list[int], priority: int
    ) -> TreeNode:
        """Add a leaf, locked by the request that inserts it."""
        node = self._make(parent, edge, key, pages, priority)
        node.lock_count = 1
        self.locked_pages += len(pages)
        self._note_run(parent, edge)
        if self._events is not None:
            last = parent.hashes[-1] if parent.hashes else None
            node.hashes = self._events.stored(last, edge[: -self._page_bytes], key)
        return node

    def _extend(self, node: TreeNode, key: bytes, pages: list[int]) -> None:
        """Grow a leaf that only its maker has used, so that the chunks of a prompt are one node."""
        if self._events is not None:
            node.hashes += self._events.stored(node.hashes[-1], b"", key)
        node.key += key
        node.pages += pages
        self._note_run(node, key[: self._page_bytes])
        self.locked_pages += len(pages)

    def _make(
        self, parent: TreeNode, edge: bytes, key: bytes, pages: list[int], priority: int
    ) -> TreeNode:
        self._uids += 1
        self._tick += 1
        self.num_nodes += 1
        start = parent.start + len(parent.pages)
        node = TreeNode(self._uids, edge, key, pages, parent, start, self._tick, priority)
        parent.children[edge] = node
        return node

    def _detach(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        self.num_nodes -= 1
        leaf.parent, leaf.key, leaf.pages = None, b"", []
        if parent.is_evictable_leaf():
            self._order.push(parent)

    def _note_cut(self, node: TreeNode) -> None:
        if node.uid in self.watched:
            self.changed[node.uid] = None

    def _note_run(self, node: TreeNode, edge: bytes) -> None:
        if (
            node.uid in self.watched
            and (edges := self.changed.setdefault(node.uid, set())) is not None
        ):
            edges.add(edge)

    def _use(self, node: TreeNode, priority: int) -> None:
        if node.lock_count == 0:
            self.evictable_pages -= len(node.pages)
            self.locked_pages += len(node.pages)
        node.lock_count += 1
        node.hits += 1
        node.priority = max(node.priority, priority)
