"""The prefix tree against a plain dict of page runs, and its edges one by one."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tokenloom.scheduler_proc.core.radix_cache import RadixCache, TreeNode

Run = tuple[int, ...]


def key_of(ids: Run) -> bytes:
    return array("i", ids).tobytes()


class TreeAgainstDict(RuleBasedStateMachine):
    """The model: a dict from every cached page-aligned prefix to the page of its last tokens."""

    locks = Bundle("locks")

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixCache(page_size)
        self.model: dict[Run, int] = {}
        self.locked: list[tuple[TreeNode, Run]] = []
        self.next_page = 1

    def whole(self, ids: list[int]) -> Run:
        return tuple(ids[: len(ids) // self.page_size * self.page_size])

    def prefixes(self, ids: Run) -> list[Run]:
        return [ids[:end] for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def cached(self, ids: Run) -> list[int]:
        pages = []
        for prefix in self.prefixes(ids):
            if prefix not in self.model:
                break
            pages.append(self.model[prefix])
        return pages

    @rule(ids=st.lists(st.integers(0, 2), max_size=24))
    def match(self, ids: list[int]) -> None:
        run = self.whole(ids)
        assert self.tree.match(key_of(run)).pages == self.cached(run)

    @rule(target=locks, ids=st.lists(st.integers(0, 2), max_size=24))
    def match_and_lock(self, ids: list[int]) -> tuple[TreeNode, Run]:
        run = self.whole(ids)
        match = self.tree.match(key_of(run))
        assert match.version == self.tree.version
        self.tree.lock(match.node)
        held = (match.node, run[: len(match.pages) * self.page_size])
        self.locked.append(held)
        return held

    @rule(held=locks)
    def unlock(self, held: tuple[TreeNode, Run]) -> None:
        if held in self.locked:
            self.locked.remove(held)
            self.tree.unlock(held[0])

    @rule(held=locks, more=st.lists(st.integers(0, 2), max_size=24))
    def insert_below_a_lock(self, held: tuple[TreeNode, Run], more: list[int]) -> None:
        """What a request does after a chunk: its own pages go below the prefix that it locked."""
        if held not in self.locked:
            return
        node, prefix = held
        run = self.whole(more)
        own = list(range(self.next_page, self.next_page + len(run) // self.page_size))
        self.next_page += len(own)
        inserted = self.tree.insert(node, key_of(run), own)
        paths = self.prefixes(prefix + run)[len(prefix) // self.page_size :]
        expected = [
            self.model.setdefault(path, page) for page, path in zip(own, paths, strict=True)
        ]
        assert inserted.pages == expected
        assert set(inserted.duplicates) == set(own) - set(expected)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        before = self.tree.evictable_pages
        gone = set(self.tree.evict(count))
        assert min(count, before) == len(gone)
        protected = {path for _, run in self.locked for path in self.prefixes(run)}
        for path in [path for path, page in self.model.items() if page in gone]:
            assert path not in protected, "a locked page was evicted"
            del self.model[path]
        for path in self.model:
            for prefix in self.prefixes(path):
                assert prefix in self.model, "a page was evicted before those below it"

    @invariant()
    def counts_and_structure(self) -> None:
        if not hasattr(self, "tree"):
            return
        protected = {path for _, run in self.locked for path in self.prefixes(run)}
        assert self.tree.locked_pages == len(protected)
        assert self.tree.evictable_pages == len(self.model) - len(protected)
        pages = sorted(page for node in self.tree.nodes() for page in node.pages)
        assert pages == sorted(self.model.values())


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def insert(tree: RadixCache, ids: Run, first_page: int) -> TreeNode:
    """Into a tree of one-token pages."""
    pages = list(range(first_page, first_page + len(ids)))
    return tree.insert(tree.root, key_of(ids), pages).node


def test_least_recently_used_goes_first() -> None:
    tree = RadixCache(1)
    insert(tree, (1, 2), 10)
    insert(tree, (3, 4), 20)
    tree.match(key_of((1, 2)))
    assert tree.evict(1) == [21]
    assert tree.evict(2) == [20, 11]


def test_a_long_leaf_loses_only_its_end() -> None:
    tree = RadixCache(1)
    insert(tree, tuple(range(100)), 1)
    assert tree.evict(3) == [98, 99, 100]
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


def test_a_version_outlives_uses_but_not_changes() -> None:
    tree = RadixCache(1)
    insert(tree, (1, 2, 3), 1)
    version = tree.match(key_of((1, 2))).version  # splits a node: longer matches stay possible
    assert tree.match(key_of((1, 2, 3))).version == version
    insert(tree, (1, 2, 3), 1)
    assert tree.version == version
    insert(tree, (1, 2, 3, 4), 1)
    assert tree.version != version
    version = tree.version
    tree.evict(1)
    assert tree.version != version


def test_unlock_without_lock_is_a_bug() -> None:
    tree = RadixCache(1)
    node = insert(tree, (1,), 1)
    with pytest.raises(RuntimeError, match="unlocked more often"):
        tree.unlock(node)
