"""DepthFirst: the order of --schedule-policy dfs-weight. PURE.

Made by core/schedule_policy.py. The number of requests that wait at and under each prefix tree node
is kept up to date as they come and go, so that a step looks only at the nodes that it walks.
"""

from dataclasses import dataclass

from .lane import Lane, Waiter
from .lazy_heap import Entry, Key, LazyHeap
from .radix_cache import Match, TreeNode

_AT_ROOT = 2  # key: requests without a cached prefix come after all subtrees


@dataclass(slots=True)
class Trail:
    """The node at which the last step's walk ended. Shared by the orders of a line's adapters."""

    last: TreeNode | None = None

    def next_steps(self) -> dict[int, int]:
        """The path from the root to `last`: the uid of each node by its parent's uid."""
        steps: dict[int, int] = {}
        node = self.last
        while node is not None and node.parent is not None:
            steps[node.parent.uid] = node.uid
            node = node.parent
        return steps


class _Spot(Lane):
    """A tree node at or under which requests wait; the lane holds those whose match ends there.

    When the tree splits the node, `above` stays stale until the next request is added below the
    split or the walk comes here.
    """

    __slots__ = ("above", "entry", "node", "since", "under", "visited", "weight")

    def __init__(self, node: TreeNode | None, since: int) -> None:
        super().__init__()
        self.node = node  # None: the root
        self.since = since
        self.above: _Spot | None = None
        self.entry: Entry[_Spot] | None = None  # among `above.under`
        self.under: LazyHeap[_Spot] = LazyHeap()  # heaviest first
        self.weight = 0  # requests that wait here or below
        self.visited = -1  # the step that walked here last

    @property
    def uid(self) -> int:
        return self.node.uid if self.node is not None else 0


class DepthFirst:
    """A depth-first walk of the prefix tree, heaviest subtree first, children before their parent.

    Requests that share a prefix follow each other, so that it stays cached for them. For the same
    reason a step's walk goes on where the last one ended, even if more requests wait elsewhere now.
    Of equally heavy subtrees the one that has had waiting requests for longer comes first.
    """

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._root = _Spot(None, 0)
        self._spots: dict[int, _Spot] = {}
        self._opened = 0  # spots made so far
        self._step = 0
        self._steps: dict[int, int] = {}
        self._path: list[_Spot] = [self._root]
        self._key: Key = ()
        self._visited: list[tuple[_Spot, Entry[_Spot]]] = []  # popped from the parent's heap
        self._taken_at: list[_Spot] = []

    def __len__(self) -> int:
        return self._root.weight

    def add(self, waiter: Waiter, match: Match | None) -> None:
        assert match is not None
        spot = self._spot_of(match.node)
        spot.add(waiter, (waiter.req.arrival,))
        self._weigh(spot, 1)

    def remove(self, waiter: Waiter) -> None:
        spot = waiter.lane
        assert isinstance(spot, _Spot)
        spot.remove(waiter)
        self._weigh(spot, -1)

    def begin(self, now: int) -> None:
        for spot, entry in self._visited:
            if entry.live and not entry.inside:
                spot.under.put_back(entry)
        self._visited.clear()
        for spot in self._taken_at:
            spot.begin()
        self._taken_at.clear()
        self._step += 1
        self._steps = self._trail.next_steps()
        self._path = [self._root]

    def peek(self) -> tuple[Key, Waiter] | None:
        path = self._path
        while path:
            spot = path[-1]
            if (below := self._next_below(spot)) is not None:
                if len(path) == 1:
                    off_trail = self._steps.get(0) != below.uid
                    self._key = (off_trail, -below.weight, below.since)
                path.append(below)
            elif (found := spot.peek()) is not None:
                return (self._key if len(path) > 1 else (_AT_ROOT, *found[0])), found[1]
            else:
                path.pop()
        return None

    def take(self) -> Waiter:
        """Take the request that `peek` has just returned."""
        spot = self._path[-1]
        self._taken_at.append(spot)
        self._trail.last = spot.node
        return spot.take()

    # -- the walk

    def _next_below(self, spot: _Spot) -> _Spot | None:
        """The next unvisited spot below: first the one on the trail, then the heaviest."""
        on_trail = self._spots.get(self._steps.get(spot.uid, -1))
        if on_trail is not None and on_trail.above is spot and on_trail.visited != self._step:
            on_trail.visited = self._step
            return on_trail
        while (entry := spot.under.peek()) is not None:
            below = entry.item
            spot.under.pop()
            self._visited.append((spot, entry))
            if below.visited == self._step or self._comes_later(below, spot):
                continue
            below.visited = self._step
            return below
        return None

    def _comes_later(self, below: _Spot, spot: _Spot) -> bool:
        """Whether a split has put a node between the two that this walk has yet to visit."""
        assert below.node is not None
        parent = below.node.parent
        if parent is None or parent.uid == spot.uid:  # None: the tree has dropped the node
            return False
        self._spot_of(below.node)
        above = below.above
        while above is not None and above is not spot:
            if above.visited == self._step:
                return False
            above = above.above
        return True

    # -- the weights

    def _spot_of(self, node: TreeNode) -> _Spot:
        """Find or make the spot of a node, and bring the spots above it in line with the tree."""
        way: list[TreeNode] = []
        step: TreeNode | None = node
        while step is not None:
            if step.uid:
                way.append(step)
            step = step.parent
        spot = self._root
        for step in reversed(way):
            below = self._spots.get(step.uid)
            if below is None:
                self._opened += 1
                below = self._spots[step.uid] = _Spot(step, self._opened)
                below.above = spot
            elif below.above is not spot:
                self._hang(below, spot)
            spot = below
        return spot

    def _hang(self, spot: _Spot, above: _Spot) -> None:
        """Move a spot and its subtree below another one."""
        old, weight = spot.above, spot.weight
        assert old is not None
        if spot.entry is not None:
            old.under.remove(spot.entry)
        spot.above = above
        spot.entry = above.under.push((-weight, spot.since), spot)
        self._weigh(above, weight)  # first, so that no spot above both is closed meanwhile
        self._weigh(old, -weight)

    def _weigh(self, spot: _Spot, change: int) -> None:
        """Add `change` to the weights of `spot` and all above it; drop spots of weight 0."""
        while True:
            spot.weight += change
            above = spot.above
            if above is None:
                return
            if spot.entry is not None:
                above.under.remove(spot.entry)
                spot.entry = None
            if spot.weight:
                spot.entry = above.under.push((-spot.weight, spot.since), spot)
            else:
                del self._spots[spot.uid]
            spot = above
