"""MatchIndex: the cached prefix of every waiting request, kept current at a bounded cost per step.

Owned by core/waiting_queue.py under MATCH_POLICIES. A request is filed at the place in the tree
where its match ends, under the page that it lacks there. So a changed node affects only requests
filed at it, and a run attached to it only those that lack the run's first page. PURE.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from .kv_cache import KVCache
from .radix_cache import Match, TreeNode
from .req import Req

REFRESH_TOKENS = 1 << 15  # most tokens to look up again in a step; later steps do the rest
_LOOK = 128  # fixed cost of a lookup, in tokens


@dataclass(slots=True, eq=False)
class _Bucket:
    """Requests whose matches end at the same place and lack the same page there."""

    spot: "_Spot"
    edge: bytes
    reqs: dict[int, Req] = field(default_factory=dict)
    stale: bool = False


@dataclass(slots=True, eq=False)
class _Spot:
    node: TreeNode
    end: int  # pages of a match that ends here
    buckets: dict[bytes, _Bucket] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the match ends at the node's end; false for a node dropped from the tree."""
        return self.node.start + len(self.node.pages) == self.end

    @property
    def is_inside(self) -> bool:
        """Whether the match ends within the node."""
        return self.node.start < self.end < self.node.start + len(self.node.pages)


class MatchIndex:
    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._spots: dict[int, dict[int, _Spot]] = {}  # by node uid and end of the match
        kv.tree.watched = self._spots
        self._bucket_of: dict[int, _Bucket] = {}
        self._stale: deque[_Bucket] = deque()

    def file(self, req: Req) -> Match:
        """Look up a request and file it where its match ends."""
        match = self._kv.match(req)
        spots = self._spots.setdefault(match.node.uid, {})
        spot = spots.get(match.num_pages)
        if spot is None:
            spot = spots[match.num_pages] = _Spot(match.node, match.num_pages)
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
        """Take requests whose match may have changed, up to REFRESH_TOKENS; file them again."""
        changed = self._kv.tree.changed
        for uid, edges in changed.items():
            for spot in list(self._spots.get(uid, {}).values()):
                self._check(spot, edges)
        changed.clear()
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

    def _check(self, spot: _Spot, edges: set[bytes] | None) -> None:
        """Mark buckets stale: `edges` begin new runs below the node; None: the node was cut."""
        if edges is None:
            if spot.is_inside:
                return
            # A match that ended inside the node does not say which page it lacks at the node's end.
            edges = {b"", *spot.node.children} if spot.is_whole else set(spot.buckets)
        small, large = sorted((edges, spot.buckets.keys()), key=len)
        for edge in [edge for edge in small if edge in large]:
            bucket = spot.buckets[edge]
            self._take_out(bucket)
            bucket.stale = True
            self._stale.append(bucket)

    def _take_out(self, bucket: _Bucket) -> None:
        spot = bucket.spot
        del spot.buckets[bucket.edge]
        if not spot.buckets:
            spots = self._spots[spot.node.uid]
            del spots[spot.end]
            if not spots:
                del self._spots[spot.node.uid]
