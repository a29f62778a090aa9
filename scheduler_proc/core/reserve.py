"""Reserve: pages kept free for answers still to come, and whether one more request fits. PURE.

Made anew for a step by core/admission.py over all running requests; core/prefill_adder.py offers it
waiting ones. A candidate's cached prefix counts against the room unless others already lock it,
because locking it takes it from what eviction could free.
"""

import math
from collections.abc import Collection

from .kv_cache import KVCache
from .radix_cache import Match
from .req import Req
from .retraction import is_protected

CLIP = 4096  # an answer is never expected to be longer than this


def expected_tokens(req: Req, ratio: float) -> int:
    """Expected final length of prompt and answer, in tokens; the limit for a protected request."""
    if is_protected(req):
        return len(req.ids) + req.tokens_left
    return len(req.ids) + math.ceil(min(req.tokens_left, CLIP) * ratio)


class Reserve:
    """A candidate must fit with its answer's whole limit (up to CLIP), beside the share `ratio` of
    what is left of the others' limits.
    """

    def __init__(self, kv: KVCache, running: Collection[Req], ratio: float) -> None:
        self._kv = kv
        self._ratio = ratio
        self._room = kv.reachable_pages - sum(self._growth(req) for req in running)

    def take(self, req: Req, match: Match) -> bool:
        """Reserve the pages that a waiting request is expected to need; False if it cannot fit."""
        found = match.num_pages - self._kv.locked_by(match)  # matched pages that others lock
        if self._kv.pages_for(expected_tokens(req, 1.0)) - found > self._room:
            return False
        self._room -= self._kv.pages_for(expected_tokens(req, self._ratio)) - found
        return True

    def _growth(self, req: Req) -> int:
        assert req.kv is not None
        expected = self._kv.pages_for(expected_tokens(req, self._ratio))
        return max(0, expected - len(req.kv.pages))
