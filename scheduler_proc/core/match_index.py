"""MatchIndex: the cached prefix of every waiting request, kept true at a bounded cost a step.

Owned by core/waiting_queue.py, where the order follows the cache. A request is filed at the place
in the tree where its match ends, under the page that it lacks there. So a changed node concerns
only those filed at it, and a run attached to it only those that lack just its first page. PURE.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from .kv_cache import KVCache
from .radix_cache import Match, TreeNode
from .req import Req

REFRESH_TOKENS = 1 << 16  # that are looked up again in a step; what is left over comes next
_LOOK = 128  # what a look costs beside its length, in tokens


@dataclass(slots=True, eq=False)
class _Bucket:
    """Requests whose matches end at the same place, and lack the same page there."""

    spot: "_Spot"
    edge: bytes
    reqs: dict[int, Req] = field(default_factory=dict)
    stale: bool = False


@dataclass(slots=True, eq=False)
class _Spot:
    node: TreeNode
    end: int  # pages of a match that ends here
    version: int  # of the node, when the matches that end here were last known to be right
    buckets: dict[bytes, _Bucket] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """A match ends at the end of the node, which is still in the tree: else it has no pages."""
        return self.node.start + len(self.node.pages) == self.end


class MatchIndex:
    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._spots: dict[tuple[int, int], _Spot] = {}
        self._bucket_of: dict[int, _Bucket] = {}
        self._stale: deque[_Bucket] = deque()

    def file(self, req: Req) -> Match:
        """Look up a request, and remember where its match ends."""
        match = self._kv.match(req)
        key = (match.node.uid, match.num_pages)
        spot = self._spots.get(key)
        if spot is None:
            spot = self._spots[key] = _Spot(match.node, match.num_pages, match.node.version)
        bucket = spot.buckets.get(match.edge)
        if bucket is None:
            bucket = spot.buckets[match.edge] = _Bucket(spot, match.edge)
        bucket.reqs[req.rid] = req
        self._bucket_of[req.rid] = bucket
        return match

    def drop(self, req: Req) -> None:
        bucket = self._bucket_of.pop(req.rid)
        del bucket.reqs[req.rid]
        if not bucket.reqs and not bucket.stale:
            self._take_out(bucket)

    def take_stale(self) -> list[Req]:
        """Those whose match may have changed, as many as a step can afford: file them again."""
        for spot in list(self._spots.values()):
            if spot.version != spot.node.version:
                self._check(spot)
        taken: list[Req] = []
        tokens = 0
        while self._stale and tokens < REFRESH_TOKENS:
            bucket = self._stale[0]
            for req in list(islice(bucket.reqs.values(), REFRESH_TOKENS // _LOOK)):
                if tokens >= REFRESH_TOKENS:
                    break
                taken.append(req)
                tokens += _LOOK + len(req.ids)
                del bucket.reqs[req.rid], self._bucket_of[req.rid]
            if not bucket.reqs:
                self._stale.popleft()
        return taken

    def _check(self, spot: _Spot) -> None:
        """The node has changed: a match is longer only if it has a child for the page."""
        spot.version = spot.node.version
        changed = spot.node.children if spot.is_whole else spot.buckets
        for edge in [edge for edge in spot.buckets if edge in changed]:
            bucket = spot.buckets[edge]
            self._take_out(bucket)
            bucket.stale = True
            self._stale.append(bucket)

    def _take_out(self, bucket: _Bucket) -> None:
        spot = bucket.spot
        del spot.buckets[bucket.edge]
        if not spot.buckets:
            del self._spots[spot.node.uid, spot.end]
