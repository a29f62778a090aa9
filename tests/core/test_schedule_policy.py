"""Each order against its sentence, spelt out without any index."""

from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.scheduler_proc.core.depth_first import DepthFirst
from tokenloom.scheduler_proc.core.lane import Waiter
from tokenloom.scheduler_proc.core.radix_cache import Match, RadixCache, TreeNode
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.schedule_policy import order_factory
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulePolicy, SchedulingConfig, contradiction

Waiting = list[tuple[Req, Match]]
NOW = 1000


class Ordered:
    """An order by itself, without the line that owns it."""

    def __init__(self, policy: SchedulePolicy, page_size: int) -> None:
        self.order = order_factory(policy, page_size)()
        self._waiters: dict[int, Waiter] = {}

    def add(self, req: Req, match: Match) -> None:
        self._waiters[req.rid] = Waiter(req)
        self.order.add(self._waiters[req.rid], match)

    def remove(self, req: Req) -> None:
        self.order.remove(self._waiters.pop(req.rid))

    def in_order(self, now: int) -> list[Req]:
        """A step that tries all and starts none."""
        self.order.begin(now)
        found = []
        while (head := self.order.peek()) is not None:
            found.append(self.order.take().req)
            assert head[1].req is found[-1]
        assert len(found) == len(self.order)
        return found


def key_of(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@st.composite
def waiting(draw: st.DrawFn) -> tuple[RadixCache, Waiting]:
    """Requests over a tree of one-token pages, in a random order of coming."""
    tree = RadixCache(1)
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for number, run in enumerate(draw(st.lists(ids, max_size=8))):
        tree.insert(
            tree.root, key_of(run), list(range(10 * number + 1, 10 * number + 1 + len(run)))
        )
    prompts = draw(st.lists(st.tuples(ids, st.integers(0, 3), st.integers(1, 40)), max_size=12))
    reqs = []
    for arrival, (prompt, priority, answer) in enumerate(prompts):
        req = Req(
            arrival, arrival, SamplingParams(), array("i", prompt), len(prompt), answer, frozenset()
        )
        req.priority, req.arrived_at = priority, 7 * arrival
        reqs.append(req)
    for req in reqs:
        tree.match(key_of(list(req.ids)))  # whatever splits does so now
    return tree, [(req, tree.match(key_of(list(req.ids)))) for req in draw(st.permutations(reqs))]


def fcfs(tree: RadixCache, queue: Waiting) -> list[Req]:
    return sorted((req for req, _ in queue), key=lambda req: req.arrival)


def lpm(tree: RadixCache, queue: Waiting) -> list[Req]:
    ranked = sorted(queue, key=lambda one: (-one[1].num_pages, one[0].arrival))
    return [req for req, _ in ranked]


def priority(tree: RadixCache, queue: Waiting) -> list[Req]:
    return sorted((req for req, _ in queue), key=lambda req: (-req.priority, req.arrival))


def in_order(policy: SchedulePolicy, queue: Waiting) -> list[Req]:
    order = Ordered(policy, 1)
    for req, match in queue:
        order.add(req, match)
    for req, match in queue[::2]:  # coming back changes nothing
        order.remove(req)
        order.add(req, match)
    first = order.in_order(NOW)
    assert order.in_order(NOW) == first or policy == "dfs-weight", "a step changes nothing"
    return first


@pytest.mark.parametrize("policy", [fcfs, lpm, priority], ids=lambda one: one.__name__)
@settings(deadline=None)
@given(case=waiting())
def test_sorted_policies(
    policy: Callable[[RadixCache, Waiting], list[Req]], case: tuple[RadixCache, Waiting]
) -> None:
    name: SchedulePolicy = policy.__name__  # type: ignore[assignment]
    assert in_order(name, case[1]) == policy(*case)


@settings(deadline=None)
@given(case=waiting())
def test_the_highest_response_ratio_goes_first(case: tuple[RadixCache, Waiting]) -> None:
    """Service is rounded to an eighth of an octave, so a ratio may be 9 % off."""
    cached = {req.rid: match.num_pages for req, match in case[1]}

    def ratio(req: Req) -> float:
        service = len(req.ids) - cached[req.rid] + req.tokens_left
        return (NOW - req.arrived_at) / service

    order = in_order("hrrn", case[1])
    assert sorted(req.rid for req in order) == sorted(cached)
    for first, second in pairwise(order):
        assert ratio(first) >= ratio(second) / 1.1


def test_hrrn_lets_short_ones_by_until_a_long_one_has_waited_in_proportion() -> None:
    def req(rid: int, length: int, arrived_at: int) -> Req:
        one = Req(rid, rid, SamplingParams(), array("i", [1] * length), length, 1, frozenset())
        one.arrived_at = arrived_at
        return one

    order = Ordered("hrrn", 1)
    nothing = RadixCache(1).match(b"")
    long, short = req(1, 1000, 0), req(2, 10, 900)
    for one in (long, short):
        order.add(one, nothing)
    assert order.in_order(950) == [short, long]
    order.remove(short)
    late = req(3, 10, 49_990)
    order.add(late, nothing)
    assert order.in_order(50_000) == [long, late]


def test_a_long_prompt_of_which_most_is_cached_is_a_short_one() -> None:
    tree = RadixCache(4)
    tree.insert(tree.root, key_of([1] * 16), [1, 2, 3, 4])
    order = Ordered("hrrn", 4)
    reqs = [
        Req(rid, rid, SamplingParams(), array("i", [first] * 20), 20, 1, frozenset())
        for rid, first in ((1, 2), (2, 1))
    ]
    for req in reqs:
        order.add(req, tree.match(key_of(list(req.ids[:16]))))
    assert order.in_order(100) == reqs[::-1]


def depth_first(node: TreeNode, at: dict[int, list[Req]]) -> list[Req]:
    """One subtree's order; among equally heavy ones any is right, so they come sorted."""
    subtrees = [depth_first(child, at) for child in node.children.values()]
    subtrees.sort(key=lambda one: (-len(one), [req.arrival for req in one]))
    return [req for one in subtrees for req in one] + at.get(node.uid, [])


@settings(deadline=None)
@given(case=waiting())
def test_the_walk_goes_depth_first_to_where_most_wait(case: tuple[RadixCache, Waiting]) -> None:
    tree, queue = case
    at: dict[int, list[Req]] = {}
    for req, match in sorted(queue, key=lambda one: one[0].arrival):
        at.setdefault(match.node.uid, []).append(req)
    ranks = {req.rid: rank for rank, req in enumerate(in_order("dfs-weight", queue))}
    assert sorted(ranks) == sorted(req.rid for req, _ in queue)

    def span(reqs: list[Req]) -> tuple[int, int]:
        return min(ranks[one.rid] for one in reqs), max(ranks[one.rid] for one in reqs)

    for node in [tree.root, *tree.nodes()]:
        own = at.get(node.uid, [])
        assert own == sorted(own, key=lambda req: ranks[req.rid]), "one place: by arrival"
        subtrees = [one for child in node.children.values() if (one := depth_first(child, at))]
        subtrees.sort(key=span)
        assert [len(one) for one in subtrees] == sorted(map(len, subtrees), reverse=True)
        everyone = [req for one in subtrees for req in one] + own
        if everyone:
            first, last = span(everyone)
            assert last - first == len(everyone) - 1, "a subtree is left only when it is done"
        if subtrees and own:
            assert span(own)[0] > span(subtrees[-1])[1], "who waits deeper comes first"


def test_requests_at_a_node_that_the_tree_has_dropped_are_still_walked_to() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, key_of([1, 2]), [1, 2]).node
    req = Req(1, 1, SamplingParams(), array("i", [1, 2, 3]), 3, 1, frozenset())
    order = Ordered("dfs-weight", 1)
    order.add(req, tree.match(key_of([1, 2, 3])))
    tree.unlock(node)
    assert tree.evict(2) == [2, 1]
    assert order.in_order(0) == [req]


def test_it_is_no_weight_to_lie_deep() -> None:
    tree = RadixCache(1)
    for depth in range(1, 5):
        tree.insert(tree.root, key_of([1] * depth + [2]), list(range(depth * 10, depth * 11 + 1)))
    tree.insert(tree.root, key_of([3]), [99])
    order = Ordered("dfs-weight", 1)
    reqs = []
    for rid, ids in enumerate(([1] * 4, [3], [3])):
        req = Req(rid, rid, SamplingParams(), array("i", [*ids, 0]), len(ids) + 1, 1, frozenset())
        order.add(req, tree.match(key_of(ids)))
        reqs.append(req)
    assert order.in_order(0) == [*reqs[1:], reqs[0]]


def test_places_where_nobody_waits_any_more_are_forgotten() -> None:
    tree = RadixCache(1)
    order = Ordered("dfs-weight", 1)
    for rid in range(1, 100):
        tree.insert(tree.root, key_of([rid]), [rid])
        req = Req(rid, rid, SamplingParams(), array("i", [rid, 0]), 2, 1, frozenset())
        order.add(req, tree.match(key_of([rid])))
        order.remove(req)
    assert isinstance(order.order, DepthFirst)
    assert not order.order._spots


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_of_the_cache_need_one(policy: SchedulePolicy) -> None:
    problem = contradiction(SchedulingConfig(schedule_policy=policy, disable_radix_cache=True))
    assert problem is not None
    assert policy in problem


def test_a_walk_notices_that_a_node_was_cut_while_requests_wait_below_it() -> None:
    """Two places of one node: once it is cut, they lie in the same subtree, the heavier one."""
    tree = RadixCache(1)
    node = tree.insert(tree.root, key_of([1, 1, 1, 1]), [1, 2, 3, 4]).node
    tree.unlock(node)
    tree.insert(tree.root, key_of([5]), [9])
    order = Ordered("dfs-weight", 1)
    reqs = [
        Req(rid, rid, SamplingParams(), array("i", ids), len(ids), 1, frozenset())
        for rid, ids in enumerate(([5, 0], [5, 7], [1, 1, 1, 1, 0], [1, 1, 2, 0], [1, 1, 2, 3]))
    ]
    for req in reqs[:3]:
        order.add(req, tree.match(key_of(list(req.ids[:-1]))))
    tree.insert(tree.root, key_of([1, 1, 2]), [1, 2, 12])
    for req in reqs[3:]:
        order.add(req, tree.match(key_of(list(req.ids[:-1]))))
    assert set(order.in_order(0)) == set(reqs)
    assert order.in_order(0) == [*reqs[2:], *reqs[:2]], "the last walk has ended in this subtree"


def test_a_walk_goes_on_in_the_subtree_where_the_last_one_ended() -> None:
    tree = RadixCache(1)
    make = order_factory("dfs-weight", 1)
    orders = [make(), make()]  # of two adapters: they share the trail
    for first in (1, 2):
        tree.insert(tree.root, key_of([first]), [first])
    for rid, (order, first) in enumerate(zip(orders, (1, 2), strict=True)):
        for n in range(2 + rid):
            req = Req(n, n, SamplingParams(), array("i", [first, n]), 2, 1, frozenset())
            order.add(Waiter(req), tree.match(key_of([first])))
    for order in orders:
        order.begin(0)
    keys = [head[0] for order in orders if (head := order.peek())]
    assert keys[1] < keys[0], "more wait there"
    orders[0].take()
    for order in orders:
        order.begin(0)
    keys = [head[0] for order in orders if (head := order.peek())]
    assert keys[0] < keys[1], "the walk was there"


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "hrrn", "dfs-weight", "priority"])
@settings(deadline=None, max_examples=50)
@given(case=waiting(), data=st.data())
def test_a_step_that_starts_some_goes_on_with_the_rest(
    policy: SchedulePolicy, case: tuple[RadixCache, Waiting], data: st.DataObject
) -> None:
    """Each is offered once, whoever leaves meanwhile; and the next step offers what is left."""
    order = Ordered(policy, 1)
    for req, match in case[1]:
        order.add(req, match)
    left = {req.rid for req, _ in case[1]}
    for _ in range(3):
        order.order.begin(NOW)
        seen = []
        while order.order.peek() is not None:
            req = order.order.take().req
            seen.append(req.rid)
            if data.draw(st.booleans()):
                order.remove(req)
                left.discard(req.rid)
        assert len(seen) == len(set(seen))
        assert left <= set(seen)
    assert {req.rid for req in order.in_order(NOW)} == left
