"""PrefillAdder: which prompt tokens join the step, within the token budget and the pool. PURE.

Made anew for each step by core/scheduler.py. A new request is admitted when its whole expected need
fits beside the expected growth of all that runs, tested after its cached prefix has been locked,
because locking takes that prefix out of what eviction could free.
"""

import math
from collections.abc import Iterable

from .kv_cache import KVCache
from .new_token_ratio import CLIP
from .req import Req

MAX_RETRACTIONS = 2  # after so many, a request is admitted only with all it may need in reserve


def is_protected(req: Req) -> bool:
    """Retracted often enough: the pool keeps its full need, so nobody has to retract it again."""
    return req.retractions >= MAX_RETRACTIONS


def expected_tokens(req: Req, ratio: float) -> int:
    """How long prompt and answer are expected to become, never more than the request allows."""
    if is_protected(req):
        return len(req.ids) + req.tokens_left
    return len(req.ids) + math.ceil(min(req.tokens_left, CLIP) * ratio)


class PrefillAdder:
    def __init__(self, kv: KVCache, *, budget: int, chunking: bool, ratio: float) -> None:
        self._kv = kv
        self._left = budget
        self._chunking = chunking
        self._ratio = ratio
        self._reserved = 0
        self.added: list[tuple[Req, int]] = []  # request, tokens of it in this step
        self.was_cut = False  # the last one added has more prompt than this step computes

    def reserve_for(self, running: Iterable[Req]) -> None:
        """Set aside the pages that decoding requests are expected to ask for."""
        self._reserved += sum(self._growth(req) for req in running)

    def continue_chunked(self, req: Req) -> bool:
        """Another piece of a prompt that is under way. It holds pages, so it comes first."""
        return self._take(req)

    def add_new(self, req: Req) -> bool:
        """Admit a waiting request with its first piece, or leave it untouched and say False."""
        match = self._kv.match(req)
        if self._piece(match.num_pages * self._kv.page_size, len(req.ids)) <= 0:
            return False
        needed = self._kv.pages_for(expected_tokens(req, 1.0)) - match.num_pages
        if needed > self._kv.reachable_beside(match) - self._reserved:
            return False
        self._kv.admit(req, match)
        return self._take(req)

    def _take(self, req: Req) -> bool:
        kv = req.kv
        assert kv is not None
        tokens = self._piece(kv.computed, len(req.ids))
        if tokens <= 0 or not self._kv.make_room(self._kv.missing_pages(kv, tokens)):
            return False
        self._kv.grow(kv, tokens)
        self._left -= tokens
        self._reserved += self._growth(req)
        self.added.append((req, tokens))
        self.was_cut = kv.computed + tokens < len(req.ids)
        return True

    def _growth(self, req: Req) -> int:
        kv = req.kv
        assert kv is not None
        return max(0, self._kv.pages_for(expected_tokens(req, self._ratio)) - len(kv.pages))

    def _piece(self, computed: int, total: int) -> int:
        """Tokens to compute now: all that are left, or up to a page border within the budget."""
        if total - computed <= self._left:
            return total - computed
        if self._chunking:
            return (computed + self._left) // self._kv.page_size * self._kv.page_size - computed
        return 0 if self.added else total - computed  # uncut: an oversize prompt goes alone
