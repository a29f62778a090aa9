"""RadixCache: a compressed trie over pages of token ids that says which KV pages hold which prefix.

Owned by core/kv_cache.py, the only caller. Keys are the int32 bytes of whole pages of ids, so runs
are compared as memory. The tree owns the pages in its nodes but never touches the allocator: evict
returns the pages that the caller gives back. PURE.
"""

from dataclasses import dataclass, field

from .eviction import LRUOrder

ID_BYTES = 4


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of pages below `parent`. `lock_count` requests read this node or a node under it."""

    uid: int
    key: bytes
    pages: list[int]
    parent: "TreeNode | None"
    children: dict[bytes, "TreeNode"] = field(default_factory=dict)
    lock_count: int = 0
    last_use: int = 0

    def is_evictable_leaf(self) -> bool:
        return not self.lock_count and not self.children and self.parent is not None


@dataclass(slots=True, frozen=True)
class Match:
    """A longest cached prefix, true for one `version` of the tree."""

    version: int
    node: TreeNode
    pages: list[int]


@dataclass(slots=True, frozen=True)
class Inserted:
    node: TreeNode  # where the inserted run ends
    pages: list[int]  # the tree's pages for it
    duplicates: list[int]  # given pages that the tree had under other numbers: free them


class RadixCache:
    """`evictable_pages` and `locked_pages` sum to the pages in the tree."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._tick = 0
        self._uids = 0
        self._order: LRUOrder[TreeNode] = LRUOrder()
        self.root = TreeNode(0, b"", [], None)
        self.version = 0  # changes whenever a match may have become longer or shorter
        self.evictable_pages = 0
        self.locked_pages = 0

    def match(self, key: bytes) -> Match:
        """The longest prefix of `key` in the tree; counts as a use of it."""
        node, done = self.root, 0
        pages: list[int] = []
        while child := node.children.get(key[done : done + self._page_bytes]):
            common = self._common_pages(child.key, key, done)
            if common < len(child.pages):
                child = self._split(child, common)
            self._touch(child)
            pages += child.pages
            done += len(child.key)
            node = child
        return Match(self.version, node, pages)

    def insert(self, node: TreeNode, key: bytes, pages: list[int]) -> Inserted:
        """Add a run of whole pages below `node`. The tree takes them, except the duplicates."""
        owned: list[int] = []
        done = 0
        while done < len(key):
            child = node.children.get(key[done : done + self._page_bytes])
            if child is None:
                child = self._attach(node, key[done:], pages[len(owned) :])
            else:
                common = self._common_pages(child.key, key, done)
                if common < len(child.pages):
                    child = self._split(child, common)
            self._touch(child)
            owned += child.pages
            done += len(child.key)
            node = child
        duplicates = [page for page, kept in zip(pages, owned, strict=True) if page != kept]
        return Inserted(node, owned, duplicates)

    def lock(self, node: TreeNode) -> None:
        """Keep `node` and all above it from eviction until a matching unlock."""
        step: TreeNode | None = node
        while step is not None and step is not self.root:
            if step.lock_count == 0:
                self.evictable_pages -= len(step.pages)
                self.locked_pages += len(step.pages)
            step.lock_count += 1
            step = step.parent

    def unlock(self, node: TreeNode) -> None:
        step: TreeNode | None = node
        while step is not None and step is not self.root:
            if step.lock_count <= 0:
                raise RuntimeError(f"tree node {step.uid} was unlocked more often than locked")
            step.lock_count -= 1
            if step.lock_count == 0:
                self.evictable_pages += len(step.pages)
                self.locked_pages -= len(step.pages)
                if not step.children:
                    self._order.push(step)
            step = step.parent

    def evict(self, count: int) -> list[int]:
        """Drop at least min(count, evictable) pages, least recently used first; returns them.

        A long leaf loses only as many pages from its end as are needed.
        """
        evicted: list[int] = []
        while len(evicted) < count and (leaf := self._order.pop()):
            keep = max(0, len(leaf.pages) - (count - len(evicted)))
            evicted += leaf.pages[keep:]
            if keep:
                del leaf.pages[keep:]
                leaf.key = leaf.key[: keep * self._page_bytes]
                self._order.push(leaf)
            else:
                self._detach(leaf)
        if evicted:
            self.evictable_pages -= len(evicted)
            self.version += 1
        return evicted

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root. For conservation checks."""
        found: list[TreeNode] = []
        todo = [self.root]
        while todo:
            children = todo.pop().children.values()
            found += children
            todo += children
        return found

    def _common_pages(self, run: bytes, key: bytes, start: int) -> int:
        """How many whole pages `run` and `key[start:]` share; at least one (the child's key)."""
        page_bytes = self._page_bytes
        limit = min(len(run), len(key) - start) // page_bytes
        if run[: limit * page_bytes] == key[start : start + limit * page_bytes]:
            return limit
        low, high = 1, limit  # run and key agree on `low` pages and differ within `high`
        while high - low > 1:
            middle = (low + high) // 2
            first, last = low * page_bytes, middle * page_bytes
            if run[first:last] == key[start + first : start + last]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: TreeNode, count: int) -> TreeNode:
        """Cut `node` after `count` pages. It stays the lower part: whoever holds it still does."""
        parent = node.parent
        assert parent is not None
        cut = count * self._page_bytes
        self._uids += 1
        upper = TreeNode(self._uids, node.key[:cut], node.pages[:count], parent)
        upper.lock_count, upper.last_use = node.lock_count, node.last_use
        node.key, node.pages, node.parent = node.key[cut:], node.pages[count:], upper
        upper.children[node.key[: self._page_bytes]] = node
        parent.children[upper.key[: self._page_bytes]] = upper
        return upper

    def _attach(self, parent: TreeNode, key: bytes, pages: list[int]) -> TreeNode:
        self._uids += 1
        node = TreeNode(self._uids, key, pages, parent)
        parent.children[key[: self._page_bytes]] = node
        self.evictable_pages += len(pages)
        self.version += 1
        return node

    def _detach(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent, leaf.pages = None, []
        if parent.is_evictable_leaf():
            self._order.push(parent)

    def _touch(self, node: TreeNode) -> None:
        self._tick += 1
        node.last_use = self._tick
        if node.is_evictable_leaf():
            self._order.push(node)
