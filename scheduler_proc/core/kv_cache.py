"""KVCache: page and row ownership. Ties the allocator, the prefix tree and the requests together.

Owned by core/scheduler.py. At any moment every page is in exactly one of: the free list, the tree,
one request's own pages. Pages that a request receives, or that replace its own because the tree had
them already, are noted for the runner, which keeps a copy of the page table. PURE.
"""

from ...wire.config import SchedulingConfig
from .kv_allocator import ReqToTokenPool, TokenToKVPoolAllocator
from .kv_events import KVEventLog
from .radix_cache import ID_BYTES, Match, RadixCache
from .req import Req, ReqKV


class KVCache:
    def __init__(self, settings: SchedulingConfig, num_pages: int) -> None:
        self.page_size = settings.page_size
        self.pages = TokenToKVPoolAllocator(num_pages)
        self.rows = ReqToTokenPool(settings.max_running_requests)
        self.events = KVEventLog(self.page_size) if settings.kv_events else None
        self.tree = RadixCache(self.page_size, settings.eviction_policy, self.events)
        self._reuse = not settings.disable_radix_cache
        self._news: list[tuple[int, int, int]] = []

    @property
    def capacity_tokens(self) -> int:
        return self.pages.capacity * self.page_size

    @property
    def reachable_pages(self) -> int:
        """Free ones, and those that eviction could free."""
        return self.pages.available + self.tree.evictable_pages

    def reachable_beside(self, match: Match) -> int:
        """As reachable_pages, once `match` is locked: what is locked cannot be evicted."""
        return self.reachable_pages - self.tree.unlocked_pages(match)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, req: Req) -> Match:
        """The request's longest cached prefix, at most all but one of its tokens.

        Looked up again only after the tree has changed where the last look ended.
        """
        if req.match is None or not req.match.is_fresh:
            whole = (len(req.ids) - 1) // self.page_size * self.page_size
            key = req.ids[:whole].tobytes() if self._reuse else b""
            req.match = self.tree.match(key, req.namespace.encode())
        return req.match

    def admit(self, req: Req, match: Match) -> None:
        """Give the request a row and lock its matched prefix. Needs a free row, a fresh match."""
        node = self.tree.lock(match, req.priority)
        (row,) = self.rows.alloc(1)
        computed = match.num_pages * self.page_size
        req.kv = ReqKV(row, match.pages, match.num_pages, node, computed)
        req.match = None  # the request will outgrow it
        self._note(req.kv, 0)

    def make_room(self, num_pages: int) -> bool:
        """Evict what is missing; False if the tree cannot give enough."""
        missing = num_pages - self.pages.available
        if missing > 0:
            self.pages.free(self.tree.evict(missing))
        return self.pages.available >= num_pages

    def is_full(self, kv: ReqKV) -> bool:
        """The next token needs a new page."""
        return kv.computed == len(kv.pages) * self.page_size

    def missing_pages(self, kv: ReqKV, num_tokens: int) -> int:
        """How many more pages the request needs before its next `num_tokens` can be computed."""
        return max(0, self.pages_for(kv.computed + num_tokens) - len(kv.pages))

    def grow(self, kv: ReqKV, num_tokens: int) -> None:
        """Give the request the pages for its next tokens. The caller has made room."""
        missing = self.missing_pages(kv, num_tokens)
        if missing:
            start = len(kv.pages)
            kv.pages += self.pages.alloc(missing)
            self._note(kv, start)

    def commit(self, req: Req) -> None:
        """Hand the request's full computed pages to the tree, and lock them there for it."""
        kv = req.kv
        assert kv is not None
        full = kv.computed // self.page_size
        if not self._reuse or full <= kv.tree_pages:
            return
        first = kv.tree_pages
        key = req.ids[first * self.page_size : full * self.page_size].tobytes()
        assert len(key) == (full - first) * self.page_size * ID_BYTES
        namespace = req.namespace.encode()
        inserted = self.tree.insert(kv.node, key, kv.pages[first:full], namespace, req.priority)
        kv.node, kv.tree_pages = inserted.node, full
        if inserted.duplicates:
            self.pages.free(inserted.duplicates)
            kv.pages[first:full] = inserted.pages
            self._note(kv, first)

    def release(self, req: Req, *, keep: bool = True) -> None:
        """Take everything back, whatever way the request ended; a second call does nothing.

        `keep=False` leaves what the tree does not have yet out of it: its KV is not to be trusted.
        """
        kv = req.kv
        if kv is None:
            return
        if keep:
            self.commit(req)
        self.pages.free(kv.pages[kv.tree_pages :])
        self.tree.unlock(kv.node)
        self.rows.free([kv.row])
        req.kv = None

    def flush(self) -> int:
        """Forget all cached prefixes, while no request holds any; returns how many pages."""
        pages = self.tree.clear()
        self.pages.free(pages)
        return len(pages)

    def take_new_pages(self) -> list[tuple[int, int, int]]:
        """(row, index, page) entries since the last call, in the order in which they happened."""
        news, self._news = self._news, []
        return news

    def _note(self, kv: ReqKV, start: int) -> None:
        self._news += [(kv.row, i, kv.pages[i]) for i in range(start, len(kv.pages))]
