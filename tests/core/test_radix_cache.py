"""The prefix tree against a plain dict of pages, for every policy; and its edges one by one."""

from array import array
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from tokenloom.scheduler_proc.core.eviction import EQUAL_COST_TOKENS
from tokenloom.scheduler_proc.core.radix_cache import Match, RadixCache, TreeNode
from tokenloom.wire.scheduling_config import EvictionPolicy

Run = tuple[int, ...]
Path = tuple[str, Run]  # a namespace and all ids up to the end of a page
NAMESPACES = ["", "a", "aaaa"]


def key_of(ids: Run) -> bytes:
    return array("i", ids).tobytes()


@dataclass
class Page:
    page: int
    created: int
    priority: int
    depth: int  # tokens up to its end
    locks: int = 1
    hits: int = 0
    last_use: int = 0
    clock: float = 0.0

    def worth(self, policy: EvictionPolicy) -> tuple[float, ...]:
        """The policies, told again: what is worth least goes first."""
        return {
            "lru": (self.last_use,),
            "lfu": (self.hits, self.last_use),
            "slru": (self.hits > 0, self.last_use),
            "fifo": (self.created,),
            "priority": (self.priority, self.last_use),
            "cost": (self.clock + 1 + self.depth / EQUAL_COST_TOKENS, self.last_use),
        }[policy]


class Cache:
    """The model: no tree, no nodes, no heap; one entry for each page, every search a walk."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.policy = policy
        self.pages: dict[Path, Page] = {}
        self.ticks = 0
        self.clock = 0.0

    def paths(self, namespace: str, ids: Run) -> list[Path]:
        ends = range(self.page_size, len(ids) + 1, self.page_size)
        return [(namespace, ids[:end]) for end in ends]

    def cached(self, namespace: str, ids: Run) -> list[Path]:
        found = []
        for path in self.paths(namespace, ids):
            if path not in self.pages:
                break
            found.append(path)
        return found

    def use(self, path: Path, priority: int) -> None:
        page = self.pages[path]
        page.locks += 1
        page.hits += 1
        page.priority = max(page.priority, priority)

    def leave(self, paths: list[Path]) -> None:
        self.ticks += 1
        for path in paths:
            page = self.pages[path]
            page.locks -= 1
            if not page.locks:
                page.last_use, page.clock = self.ticks, self.clock

    def add(self, last: Path, paths: list[Path], pages: list[int], priority: int) -> None:
        """What a request appends to a run that only it has used is as old as that run."""
        self.ticks += 1
        run = self.pages.get(last)
        is_end = all((name, ids[: -self.page_size]) != last for name, ids in self.pages)
        own = run is not None and run.locks == 1 and not run.hits and is_end
        created = run.created if own else self.ticks
        for path, page in zip(paths, pages, strict=True):
            if path in self.pages:
                self.use(path, priority)
            else:
                self.pages[path] = Page(page, created, priority, len(path[1]))

    def evict(self, count: int) -> list[int]:
        gone = []
        while len(gone) < count:
            parents = {(name, ids[: -self.page_size]) for name, ids in self.pages}
            leaves = [
                (page.worth(self.policy), path)
                for path, page in self.pages.items()
                if not page.locks and path not in parents
            ]
            if not leaves:
                break
            worth, path = min(leaves)
            self.clock = max(self.clock, worth[0])
            gone.append(self.pages.pop(path).page)
        return gone


# Pieces of few texts, which part within pages and between them: else hardly anything is ever found.
TEXTS = [
    tuple(range(100 * number, 100 * number + shared)) + tuple(range(shared, 24))[::-1]
    for number, shared in ((0, 0), (0, 5), (0, 8), (0, 13), (1, 8), (1, 24))
]
IDS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(0, 24))


class TreeAgainstDict(RuleBasedStateMachine):
    locks = Bundle("locks")

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), policy=st.sampled_from(get_args(EvictionPolicy))
    )
    def start(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.tree = RadixCache(page_size, policy)
        self.model = Cache(page_size, policy)
        self.held: dict[int, tuple[TreeNode, list[Path], int]] = {}
        self.looks: list[tuple[Match, str, Run]] = []
        self.requests = 0
        self.next_page = 1

    def whole(self, ids: Run) -> Run:
        return ids[: len(ids) // self.page_size * self.page_size]

    def hold(self, node: TreeNode, paths: list[Path], priority: int) -> int:
        self.requests += 1
        self.held[self.requests] = node, paths, priority
        return self.requests

    @rule(ids=IDS, namespace=st.sampled_from(NAMESPACES))
    def match(self, ids: Run, namespace: str) -> None:
        run = self.whole(ids)
        match = self.tree.match(key_of(run), namespace.encode())
        paths = self.model.cached(namespace, run)
        assert match.num_pages == len(paths)
        assert match.pages == [self.model.pages[path].page for path in paths]
        unlocked = sum(not self.model.pages[path].locks for path in paths)
        assert self.tree.unlocked_pages(match) == unlocked
        self.looks.append((match, namespace, run))

    @rule()
    def fresh_looks_are_right(self) -> None:
        self.looks = [look for look in self.looks if look[0].is_fresh]
        for match, namespace, run in self.looks:
            paths = self.model.cached(namespace, run)
            assert match.pages == [self.model.pages[path].page for path in paths]

    @rule(
        target=locks,
        ids=IDS,
        namespace=st.sampled_from(NAMESPACES),
        priority=st.integers(-1, 2),
    )
    def match_and_lock(self, ids: Run, namespace: str, priority: int) -> int:
        run = self.whole(ids)
        node = self.tree.lock(self.tree.match(key_of(run), namespace.encode()), priority)
        paths = self.model.cached(namespace, run)
        for path in paths:
            self.model.use(path, priority)
        return self.hold(node, [(namespace, ()), *paths], priority)

    @rule(request=consumes(locks))
    def unlock(self, request: int) -> None:
        node, paths, _ = self.held.pop(request)
        self.tree.unlock(node)
        self.model.leave(paths[1:])

    @rule(request=locks, ids=IDS)
    def insert_below_a_lock(self, request: int, ids: Run) -> None:
        """What a request does after a chunk: its own pages go below the prefix that it locked."""
        node, held, priority = self.held[request]
        namespace, prefix = held[-1]
        goes_on = ids[: len(prefix)] == prefix
        run = self.whole(ids[len(prefix) :] if goes_on else ids)
        own = list(range(self.next_page, self.next_page + len(run) // self.page_size))
        self.next_page += len(own)
        inserted = self.tree.insert(node, key_of(run), own, namespace.encode(), priority)
        paths = self.model.paths(namespace, prefix + run)[len(held) - 1 :]
        self.model.add(held[-1], paths, own, priority)
        expected = [self.model.pages[path].page for path in paths]
        assert inserted.pages == expected
        assert inserted.duplicates == [page for page in own if page not in expected]
        self.held[request] = inserted.node, held + paths, priority

    @rule(ids=IDS, namespace=st.sampled_from(NAMESPACES), priority=st.integers(-1, 2))
    def serve(self, ids: Run, namespace: str, priority: int) -> None:
        """A whole request."""
        request = self.match_and_lock(ids, namespace, priority)
        self.insert_below_a_lock(request, ids)
        self.unlock(request)

    @precondition(lambda self: self.tree.evictable_pages)
    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        assert self.tree.evict(count) == self.model.evict(count)

    @precondition(lambda self: self.model.pages and not self.held)
    @rule()
    def clear(self) -> None:
        assert sorted(self.tree.clear()) == sorted(one.page for one in self.model.pages.values())
        self.model.pages = {}

    @invariant()
    def counts_and_structure(self) -> None:
        if not hasattr(self, "tree"):
            return
        locked = sum(page.locks > 0 for page in self.model.pages.values())
        assert self.tree.locked_pages == locked
        assert self.tree.evictable_pages == len(self.model.pages) - locked
        nodes = self.tree.nodes()
        assert len(nodes) == self.tree.num_nodes
        pages = sorted(page for node in nodes for page in node.pages)
        assert pages == sorted(page.page for page in self.model.pages.values())
        leaves = sum(node.is_evictable_leaf() for node in nodes)
        assert self.tree.leaves_in_order(0, self.tree.order_length) == leaves


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def insert(tree: RadixCache, ids: Run, first_page: int, priority: int = 0) -> None:
    """What a request leaves behind in a tree of one-token pages."""
    pages = list(range(first_page, first_page + len(ids)))
    tree.unlock(tree.insert(tree.root, key_of(ids), pages, priority=priority).node)


def use(tree: RadixCache, ids: Run, priority: int = 0) -> None:
    tree.unlock(tree.lock(tree.match(key_of(ids)), priority))


def test_least_recently_used_goes_first() -> None:
    tree = RadixCache(1)
    insert(tree, (1, 2), 10)
    insert(tree, (3, 4), 20)
    use(tree, (1, 2))
    assert tree.evict(1) == [21]
    assert tree.evict(2) == [20, 11]


def test_a_look_is_no_use() -> None:
    """A crowd that waits looks often; what is evicted must not depend on it."""
    tree = RadixCache(1)
    insert(tree, (1, 2), 10)
    insert(tree, (3, 4), 20)
    match = tree.match(key_of((1,)))
    assert match.pages == [10]
    assert tree.unlocked_pages(match) == 1
    assert tree.num_nodes == 2, "a look cuts no node"
    assert tree.evict(1) == [11]


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [
        ("lru", 50),  # the newest
        ("lfu", 20),  # found twice
        ("slru", 30),  # the latest of those that were found
        ("fifo", 50),
        ("priority", 10),
        ("cost", 40),  # the longest
    ],
)
def test_each_policy_keeps_what_it_says(policy: EvictionPolicy, survivor: int) -> None:
    tree = RadixCache(1, policy)
    insert(tree, (1,), 10, priority=1)
    insert(tree, (2,), 20)
    insert(tree, (3,), 30)
    use(tree, (2,))
    use(tree, (2,))
    use(tree, (3,))
    insert(tree, tuple(range(4, 12)), 40)
    insert(tree, (5,), 50)
    tree.evict(tree.evictable_pages - 1)
    assert [node.pages for node in tree.nodes()] == [[survivor]]


def test_the_first_to_come_goes_first_though_it_is_left_last() -> None:
    tree = RadixCache(1, "fifo")
    first, second = (tree.insert(tree.root, key_of((n,)), [n]).node for n in (1, 2))
    tree.unlock(second)
    tree.unlock(first)
    assert tree.evict(2) == [1, 2]


def test_the_highest_priority_that_used_a_node_is_its_own() -> None:
    tree = RadixCache(1, "priority")
    insert(tree, (1,), 10)
    insert(tree, (2,), 20, priority=1)
    use(tree, (1,), priority=2)
    use(tree, (2,))
    use(tree, (1,))
    assert tree.evict(1) == [20]


def test_a_lesser_request_takes_nothing_of_a_node_s_priority() -> None:
    tree = RadixCache(1, "priority")
    insert(tree, (1,), 10)
    insert(tree, (2,), 20, priority=1)
    use(tree, (2,))
    use(tree, (1,))
    assert tree.evict(1) == [10]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [2, 70, 1]),
        ("lfu", [2, 70, 1]),
        ("slru", [2, 70, 1]),
        ("fifo", [2, 1, 70]),
        ("priority", [2, 70, 1]),
        ("cost", [70, 2, 1]),
    ],
)
def test_both_parts_of_a_node_that_was_cut_are_what_it_was(
    policy: EvictionPolicy, order: list[int]
) -> None:
    tree = RadixCache(1, policy)
    for ids, page in (((1, 2), 1), ((7,), 70)):
        insert(tree, ids, page, priority=2)
        for _ in range(3):
            use(tree, ids)
    use(tree, (1,))
    assert tree.num_nodes == 3
    assert tree.evict(3) == order


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_of_equals_the_least_recently_used_goes_first(policy: EvictionPolicy) -> None:
    """Also where it became a leaf after the other, when what lay below it went."""
    tree = RadixCache(1, policy)
    insert(tree, (5, 6), 10)
    insert(tree, (5, 7), 20)
    insert(tree, (8,), 30)
    use(tree, (8,))
    assert sorted(tree.evict(2)) == [11, 21]
    assert tree.evict(2) == [10, 30]


def test_cost_grows_old() -> None:
    """GreedyDual: a deep prefix that nobody uses goes before shallow ones that came much later."""
    tree = RadixCache(256, "cost")
    deep = tuple(range(256 * 20))  # worth 1 + 20 / 16
    tree.unlock(tree.insert(tree.root, key_of(deep), list(range(1, 21))).node)
    gone: list[int] = []
    for i in range(100, 200):
        tree.unlock(tree.insert(tree.root, key_of((i,) * 256), [i]).node)
        gone += tree.evict(1)
    # The shallow ones are worth 17 / 16 more than what went before them; 36 / 16 comes third.
    assert gone[:3] == [100, 101, 20]


def test_a_long_leaf_loses_only_its_end() -> None:
    tree = RadixCache(1)
    insert(tree, tuple(range(100)), 1)
    assert tree.evict(3) == [100, 99, 98]
    assert len(tree.match(key_of(tuple(range(100)))).pages) == 97


@pytest.mark.parametrize("shared", [15, 16, 17])
def test_a_match_ends_at_a_page_border(shared: int) -> None:
    """SCH-18: the matched prefix is exactly one page, one token less, one token more."""
    tree = RadixCache(16)
    tree.insert(tree.root, key_of(tuple(range(48))), [1, 2, 3])
    other = tuple(range(shared)) + tuple(range(500, 548 - shared))
    assert tree.match(key_of(other)).pages == [1][: shared // 16]


@pytest.mark.parametrize("position", range(8))
def test_every_id_of_a_page_counts(position: int) -> None:
    """SCH-26: a key that ignores one position of a page would hit here."""
    tree = RadixCache(4)
    ids = list(range(8))
    tree.insert(tree.root, key_of(tuple(ids)), [1, 2])
    ids[position] += 100
    assert tree.match(key_of(tuple(ids))).pages == [1, 2][: position // 4]


def test_eviction_always_progresses() -> None:
    """SCH-07: one-page leaves, deep chains, forks; evict(n) frees n while anything is left."""
    tree = RadixCache(1)
    for i in range(200):
        insert(tree, tuple(int(bit) for bit in f"{i:010b}"), 1000 * (i + 1))
    total = tree.evictable_pages
    freed = 0
    while tree.evictable_pages:
        freed += len(tree.evict(7))
    assert freed == total
    assert tree.nodes() == []


def test_pieces_of_a_prompt_are_one_node_until_another_request_comes() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, key_of((1, 2)), [1, 2]).node
    short = tree.match(key_of((1, 2, 3)))
    assert tree.insert(node, key_of((3,)), [3]).node is node
    assert tree.num_nodes == 1
    assert not short.is_fresh
    other = tree.lock(tree.match(key_of((1, 2, 3))))
    assert tree.insert(node, key_of((4,)), [4]).node is not node
    assert tree.insert(other, key_of((5,)), [5]).node is not node
    assert tree.num_nodes == 3


def test_what_another_request_left_does_not_grow() -> None:
    """Its hits are not those of what comes below it."""
    tree = RadixCache(1)
    insert(tree, (1, 2), 1)
    node = tree.lock(tree.match(key_of((1, 2))))
    below = tree.insert(node, key_of((3,)), [3]).node
    assert (node.hits, below.hits) == (1, 0)


def test_a_match_outlives_all_changes_but_its_own() -> None:
    tree = RadixCache(1)
    insert(tree, (1, 2, 3), 1)
    insert(tree, (7, 8), 10)
    whole, part, none = (tree.match(key_of(ids)) for ids in ((1, 2, 3, 4), (1, 2, 9), (5,)))
    insert(tree, (7, 8, 9), 20)
    insert(tree, (1, 2, 3), 1)
    assert whole.is_fresh
    assert part.is_fresh
    assert none.is_fresh
    insert(tree, (1, 2, 3, 4), 30)
    assert not whole.is_fresh
    assert part.is_fresh
    insert(tree, (1, 2, 9), 40)
    assert not part.is_fresh
    insert(tree, (5,), 50)
    assert not none.is_fresh
    last = tree.match(key_of((5,)))
    tree.evict(tree.evictable_pages)
    assert not last.is_fresh


def test_a_cleared_tree_leaves_no_match_fresh() -> None:
    tree = RadixCache(1)
    insert(tree, (1, 2, 3), 1)
    match = tree.match(key_of((1, 2)))
    assert sorted(tree.clear()) == [1, 2, 3]
    assert not match.is_fresh
    assert not tree._order._heap, "which would keep it in memory"
    assert tree.evict(1) == []


def test_what_is_in_use_cannot_be_cleared() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, key_of((1, 2)), [1, 2])
    with pytest.raises(RuntimeError, match="2 pages of the tree are in use"):
        tree.clear()


def test_unlock_without_lock_is_a_bug() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, key_of((1,)), [1]).node
    tree.unlock(node)
    with pytest.raises(RuntimeError, match="unlocked more often"):
        tree.unlock(node)


@pytest.mark.parametrize("spare", [0, 1])
def test_namespaces_part_at_the_first_page(spare: int) -> None:
    """Not even where a namespace spells a page of ids, or another namespace and a page."""
    tree = RadixCache(1)
    page = key_of((7,))
    names = [b"", page, page + page, b"x"]
    for name in names:
        match = tree.match(page, name)
        assert match.num_pages == 0
        first = 10 * names.index(name)
        tree.unlock(tree.insert(tree.lock(match), page * 2, [first, first + 1], name).node)
    for name in names:
        first = 10 * names.index(name)
        assert tree.match(page * (1 + spare), name).pages == [first, first + 1][: 1 + spare]
        assert tree.match(b"", name).num_pages == 0


def test_changes_that_may_concern_a_match_are_noted_of_nodes_that_are_watched() -> None:
    tree = RadixCache(1)
    root = tree.root
    tree.watched = range(100)

    def changed(node: TreeNode) -> set[bytes] | bool | None:
        """The runs that follow it now; None if it was cut; False if nothing is noted."""
        noted = tree.changed.get(node.uid, False)
        tree.changed.clear()
        return noted

    node = tree.insert(root, key_of((1, 2, 3)), [1, 2, 3]).node
    assert changed(root) == {key_of((1,))}, "a child"
    tree.insert(node, key_of((4,)), [4])
    assert changed(node) == {key_of((4,))}, "it grew"
    insert(tree, (1, 9), 20)
    assert changed(node) is None, "it was cut"
    tree.unlock(node)
    tree.match(key_of((1, 2)))
    use(tree, (1, 2, 3, 4))
    assert changed(node) is False, "uses are no change"
    tree.evict(tree.evictable_pages - 3)
    assert changed(node) is None, "it lost pages"
    tree.evict(tree.evictable_pages)
    assert changed(node) is None, "it is gone"
    node = tree.insert(root, key_of((1,)), [1]).node
    tree.changed.clear()
    tree.unlock(node)
    tree.clear()
    assert changed(node) is None, "all are gone"
    tree.watched = ()
    tree.insert(root, key_of((1,)), [1])
    assert not tree.changed
