"""KVCache: page and row ownership, over the allocator, the prefix tree and the requests.

Owned by core/scheduler.py. At any moment every page is in exactly one of: the free list, the tree,
one request's own pages. Pages that a request receives, or that replace its own because the tree had
them already, are logged for the runner, which keeps a copy of the page table. PURE.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...wire.scheduling_config import SchedulingConfig
from .faults import Faults
from .kv_allocator import PoolError, ReqToTokenPool, TokenToKVPoolAllocator
from .kv_events import KVEventLog
from .radix_cache import ID_BYTES, Match, RadixCache, TreeNode
from .req import Req, ReqKV


class KVCache:
    def __init__(
        self, settings: SchedulingConfig, num_pages: int, faults: Faults | None = None
    ) -> None:
        self.page_size = settings.page_size
        self.pages = TokenToKVPoolAllocator(num_pages)
        self.rows = ReqToTokenPool(settings.max_running_requests)
        self.events = KVEventLog(self.page_size) if settings.kv_events else None
        self.tree = RadixCache(self.page_size, settings.eviction_policy, self.events)
        self._reuse = not settings.disable_radix_cache
        self._faults = faults or Faults()
        self.version = 0  # counts admissions and flushes: unchanged while idle, so are the pages
        self._imagined = 0  # extra reachable pages inside `as_if_released`
        self._news: list[tuple[int, int, int]] = []

    @property
    def reachable_pages(self) -> int:
        """Free pages, and those that eviction could free."""
        return self.pages.available + self.tree.evictable_pages + self._imagined

    def locked_by(self, match: Match) -> int:
        """The number of its pages that locking it would take from eviction."""
        return self.tree.unlocked_pages(match)

    @contextmanager
    def as_if_released(self, reqs: Iterable[Req]) -> Iterator[None]:
        """Count pages as if `reqs` were released, within the `with`. Nothing may change in it."""
        held = [kv for req in reqs if (kv := req.kv)]
        for kv in held:
            self._imagined += len(kv.pages) - kv.tree_pages
            for node in _path(kv):
                node.lock_count -= 1
                self._imagined += 0 if node.lock_count else len(node.pages)
        try:
            yield
        finally:
            for kv in held:
                for node in _path(kv):
                    node.lock_count += 1
            self._imagined = 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, req: Req) -> Match:
        """The request's longest cached prefix, at most all but one of its tokens.

        Looked up again only after the tree has changed where the last match ended.
        """
        if req.match is None or not req.match.is_fresh:
            whole = (len(req.ids) - 1) // self.page_size * self.page_size
            key = b"" if self._faults.misses() else req.ids[:whole].tobytes()
            req.match = self.tree.match(key, req.namespace.encode())
        return req.match

    def admit(self, req: Req, match: Match) -> None:
        """Give the request a row and lock its matched prefix; needs a free row, a fresh match."""
        self.version += 1
        node = self.tree.lock(match, req.priority)
        (row,) = self.rows.alloc(1)
        computed = match.num_pages * self.page_size
        req.kv = ReqKV(row, match.pages, match.num_pages, node, computed, landed=computed)
        req.match = None  # stale as soon as the request grows
        self._note(req.kv, 0)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; False if the tree cannot give enough."""
        missing = num_pages - self.pages.available
        if missing > 0:
            self.pages.free(self.tree.evict(missing))
        return self.pages.available >= num_pages

    def is_full(self, kv: ReqKV) -> bool:
        """Whether the next token needs a new page."""
        return kv.computed == len(kv.pages) * self.page_size

    def missing_pages(self, kv: ReqKV, num_tokens: int) -> int:
        """The number of pages that the request lacks to compute its next `num_tokens`."""
        return max(0, self.pages_for(kv.computed + num_tokens) - len(kv.pages))

    def grow(self, kv: ReqKV, num_tokens: int) -> bool:
        """Give the request the pages for its next tokens, after `make_room`. If the allocator fails
        all the same, which is a bug, change nothing and return False.
        """
        missing = self.missing_pages(kv, num_tokens)
        if not missing:
            return True
        if self._faults.fails_allocation():
            return False
        try:
            pages = self.pages.alloc(missing)
        except PoolError:
            return False
        start = len(kv.pages)
        kv.pages += pages
        self._note(kv, start)
        return True

    def commit(self, req: Req) -> None:
        """Hand the full pages whose steps have landed to the tree, and lock them for the request.

        If the tree has a page already, the request's duplicate is freed at once, though a launched
        step may read it: its next owner writes it in a later step, and steps run in order.
        """
        kv = req.kv
        assert kv is not None
        if not self._reuse or not kv.sound:
            return
        # A step launched ahead of the end may have landed an input id that was never appended.
        first, full = kv.tree_pages, min(kv.landed, len(req.ids)) // self.page_size
        key = req.ids[first * self.page_size : full * self.page_size].tobytes()
        assert len(key) == (full - first) * self.page_size * ID_BYTES
        namespace = req.namespace.encode()
        inserted = self.tree.insert(kv.node, key, kv.pages[first:full], namespace, req.priority)
        kv.node, kv.tree_pages = inserted.node, full
        if inserted.duplicates:
            self.pages.free(inserted.duplicates)
            kv.pages[first:full] = inserted.pages
            self._note(kv, first)

    def release(self, req: Req) -> None:
        """Take back the row and pages of a request, if it holds any, after a last commit."""
        kv = req.kv
        if kv is None:
            return
        assert not kv.in_flight, "a launched step holds its pages"
        self.commit(req)
        self.pages.free(kv.pages[kv.tree_pages :])
        self.tree.unlock(kv.node)
        self.rows.free([kv.row])
        req.kv = None

    def flush(self) -> int:
        """Drop all cached prefixes, none of which may be locked; return the number of pages."""
        self.version += 1
        pages = self.tree.clear()
        self.pages.free(pages)
        return len(pages)

    def take_new_pages(self) -> list[tuple[int, int, int]]:
        """Take the (row, index, page) entries of the page table since the last call, in order."""
        news, self._news = self._news, []
        return news

    def _note(self, kv: ReqKV, start: int) -> None:
        self._news += [(kv.row, i, kv.pages[i]) for i in range(start, len(kv.pages))]


def _path(kv: ReqKV) -> Iterator[TreeNode]:
    """The tree nodes that the request locks."""
    node = kv.node
    while node.parent is not None:
        yield node
        node = node.parent
