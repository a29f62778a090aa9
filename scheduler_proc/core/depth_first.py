"""DepthFirst: the order of --schedule-policy dfs-weight. PURE.

Made by core/schedule_policy.py. How many requests wait at and under each node of the prefix tree is
kept up to date as they come and go, so that a step looks only at the nodes that it walks through.
"""

from dataclasses import dataclass

from .lane import Lane, Waiter
from .lazy_heap import Entry, Key, LazyHeap
from .radix_cache import Match, TreeNode

_AT_ROOT = 2  # whoever hits nothing comes after all subtrees


@dataclass(slots=True)
class Trail:
    """Where the walk of the last step has ended. Shared by the orders of a line's adapters."""

    last: TreeNode | None = None

    def next_steps(self) -> dict[int, int]:
        """The way from the root to the end: the uid of each node, by that of its parent."""
        steps: dict[int, int] = {}
        node = self.last
        while node is not None and node.parent is not None:
            steps[node.parent.uid] = node.uid
            node = node.parent
        return steps


class _Spot(Lane):
    """A tree node at or under which requests wait. Those whose match ends there are its lane.

    The tree may cut the node meanwhile: `above` is then out of date until the next request is
    filed below the cut or the walk comes here.
    """

    __slots__ = ("above", "entry", "node", "since", "under", "visited", "weight")

    def __init__(self, node: TreeNode | None, since: int) -> None:
        super().__init__()
        self.node = node  # None: the root
        self.since = since
        self.above: _Spot | None = None
        self.entry: Entry[_Spot] | None = None  # among `above.under`
        self.under: LazyHeap[_Spot] = LazyHeap()  # the heaviest first
        self.weight = 0  # requests that wait here or below
        self.visited = -1  # the step that walked here last

    @property
    def uid(self) -> int:
        return self.node.uid if self.node is not None else 0


class DepthFirst:
    """A walk through the prefix tree, to where most wait first, those deepest there, then upwards.

    Requests that share a prefix follow each other, so that it stays in the cache for them. So the
    walk of the next step goes on where the last one has ended, though more may wait elsewhere now.
    Of equally heavy subtrees the one in which requests have been waiting for longer comes first.
    """

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._root = _Spot(None, 0)
        self._spots: dict[int, _Spot] = {}
        self._opened = 0  # spots so far
        self._step = 0
        self._steps: dict[int, int] = {}
        self._path: list[_Spot] = [self._root]
        self._key: Key = ()
        self._visited: list[tuple[_Spot, Entry[_Spot]]] = []  # taken out of the parent's heap
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
        """The one that `peek` has just returned."""
        spot = self._path[-1]
        self._taken_at.append(spot)
        self._trail.last = spot.node
        return spot.take()

    # -- the walk

    def _next_below(self, spot: _Spot) -> _Spot | None:
        """The next spot below: the one on the way of the last walk, then the heaviest."""
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
        """A cut has put another node between the two, and the walk has yet to come there."""
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
        """The spot of a node. Spots of all nodes above it are then where the tree has them."""
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
        """Move a spot below another one, with all that waits there."""
        old, weight = spot.above, spot.weight
        assert old is not None
        if spot.entry is not None:
            old.under.remove(spot.entry)
        spot.above = above
        spot.entry = above.under.push((-weight, spot.since), spot)
        self._weigh(above, weight)  # first, so that no spot above both is closed meanwhile
        self._weigh(old, -weight)

    def _weigh(self, spot: _Spot, change: int) -> None:
        """Requests have come to `spot`, or gone: all weights up to the root."""
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
