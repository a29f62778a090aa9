"""What is kept free for answers still to come, and whether one more request fits beside it. PURE.

Made anew for a step by core/admission.py, in pages, over all that run; core/prefill_adder.py offers
it the waiting ones. A candidate is tested with its cached prefix locked, because locking takes that
prefix out of what eviction could free.
"""

import math
from collections.abc import Collection

from .kv_cache import KVCache
from .radix_cache import Match
from .req import Req
from .retraction import is_protected

CLIP = 4096  # an answer is never expected to be longer than this


def expected_tokens(req: Req, ratio: float) -> int:
    """How long prompt and answer are expected to become, never more than the request allows."""
    if is_protected(req):
        return len(req.ids) + req.tokens_left
    return len(req.ids) + math.ceil(min(req.tokens_left, CLIP) * ratio)


class Reserve:
    """A candidate must fit with its whole limit, beside a share of what is left of the others'."""

    def __init__(self, kv: KVCache, running: Collection[Req], ratio: float) -> None:
        self._kv = kv
        self._ratio = ratio
        self._room = kv.reachable_pages - sum(self._growth(req) for req in running)

    def take(self, req: Req, match: Match) -> bool:
        """Reserve what a waiting request is expected to need, if there is room for it."""
        found = match.num_pages - self._kv.locked_by(match)  # its pages that others hold anyway
        if self._kv.pages_for(expected_tokens(req, 1.0)) - found > self._room:
            return False
        self._room -= self._kv.pages_for(expected_tokens(req, self._ratio)) - found
        return True

    def _growth(self, req: Req) -> int:
        assert req.kv is not None
        expected = self._kv.pages_for(expected_tokens(req, self._ratio))
        return max(0, expected - len(req.kv.pages))
