"""The index against looking everybody up, while a tree grows, splits and is evicted under it."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.match_index import MatchIndex
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def make(rid: int, ids: list[int], namespace: str = "") -> Req:
    req = Req(rid, rid, SamplingParams(), array("i", ids), len(ids), 1, frozenset())
    req.namespace = namespace
    return req


def cache(page_size: int) -> KVCache:
    return KVCache(SchedulingConfig(page_size=page_size, max_running_requests=1), 1000)


def compute(kv: KVCache, req: Req) -> None:
    """What a scheduler does for a request, all at once."""
    kv.admit(req, kv.match(req))
    assert req.kv is not None
    missing = len(req.ids) - req.kv.computed
    kv.grow(req.kv, missing)
    req.kv.computed = req.kv.landed = len(req.ids)
    kv.release(req)


def fresh_look(kv: KVCache, req: Req) -> int:
    return kv.match(make(0, list(req.ids))).num_pages


class Watched:
    """What the queue does with an index: it remembers matches, and files again what is stale."""

    def __init__(self, page_size: int) -> None:
        self.kv = cache(page_size)
        self.index = MatchIndex(self.kv)
        self.known: dict[int, int] = {}
        self.reqs: dict[int, Req] = {}

    def add(self, req: Req) -> None:
        self.reqs[req.rid] = req
        self.known[req.rid] = self.index.file(req).num_pages

    def drop(self, req: Req) -> None:
        self.index.drop(req)
        del self.reqs[req.rid], self.known[req.rid]

    def refresh(self) -> list[int]:
        stale = self.index.take_stale()
        for req in stale:
            self.known[req.rid] = self.index.file(req).num_pages
        return [req.rid for req in stale]


@settings(deadline=None)
@given(
    page_size=st.sampled_from([1, 2]),
    events=st.lists(
        st.tuples(st.sampled_from(["wait", "leave", "compute", "evict"]), IDS), max_size=40
    ),
)
def test_every_match_is_known_after_a_refresh(
    page_size: int, events: list[tuple[str, list[int]]]
) -> None:
    watched = Watched(page_size)
    for number, (event, ids) in enumerate(events):
        match event:
            case "wait":
                watched.add(make(number, ids))
            case "leave" if watched.reqs:
                watched.drop(list(watched.reqs.values())[ids[0] % len(watched.reqs)])
            case "compute":
                compute(watched.kv, make(number, ids))
            case "evict":
                watched.kv.pages.free(watched.kv.tree.evict(len(ids)))
        if len(ids) % 3:  # else changes pile up
            watched.refresh()
            for req in watched.reqs.values():
                assert watched.known[req.rid] == fresh_look(watched.kv, req)
    for req in list(watched.reqs.values()):
        watched.drop(req)
    assert not watched.index._spots
    assert not watched.index._bucket_of


def test_only_those_whom_a_change_concerns_are_looked_up() -> None:
    watched = Watched(1)
    compute(watched.kv, make(0, [1, 2, 3]))
    for rid, ids in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [8, 8], [9, 9]), 1):
        watched.add(make(rid, ids))
    assert watched.refresh() == []
    compute(watched.kv, make(0, [8, 8, 8]))
    assert watched.refresh() == [3]
    compute(watched.kv, make(0, [1, 2, 3, 4]))
    assert watched.refresh() == [1]
    compute(watched.kv, make(0, [1, 2, 5]))
    assert watched.refresh() == []
    assert watched.known == {1: 4, 2: 3, 3: 1, 4: 0}


def test_a_match_that_cannot_grow_is_left_alone() -> None:
    """The last token is always computed, so the page that holds it is never looked for."""
    watched = Watched(2)
    compute(watched.kv, make(0, [1, 1]))
    watched.add(make(1, [1, 1, 2, 2]))
    watched.add(make(2, [1, 1, 2, 2, 3]))
    compute(watched.kv, make(0, [1, 1, 2, 2]))
    assert watched.refresh() == [2]
    assert watched.known == {1: 1, 2: 2}


def test_namespaces_part_at_the_root() -> None:
    watched = Watched(1)
    watched.add(make(1, [1, 2, 3], "a"))
    watched.add(make(2, [1, 2, 3], "b"))
    compute(watched.kv, make(0, [1, 2], "b"))
    assert watched.refresh() == [2]
    assert watched.known == {1: 0, 2: 2}


def test_a_match_inside_a_node_is_followed_when_the_node_loses_its_end() -> None:
    watched = Watched(1)
    compute(watched.kv, make(0, [1, 2, 3, 4]))
    watched.add(make(1, [1, 2, 9]))
    watched.kv.pages.free(watched.kv.tree.evict(1))
    watched.refresh()
    assert watched.refresh() == []
    assert watched.known == {1: 2}
    watched.kv.pages.free(watched.kv.tree.evict(2))
    assert watched.refresh() == [1]
    assert watched.known == {1: 1}


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_cleared_tree_is_noticed_by_all(depth: int) -> None:
    """Whether their match ended inside a node, at its end or above it."""
    watched = Watched(1)
    compute(watched.kv, make(0, [1, 2, 3]))
    watched.add(make(1, [*[1, 2, 3, 4][:depth], 9]))
    watched.kv.flush()
    assert watched.refresh() == [1]
    assert watched.known == {1: 0}


@pytest.mark.parametrize(("length", "most"), [(3, 256), (1000, 30)])
def test_a_step_looks_up_a_bounded_number_and_the_rest_comes_next(length: int, most: int) -> None:
    """Few of long prompts, for their ids are read."""
    watched, count = Watched(1), 4 * most
    for rid in range(1, count + 1):
        watched.add(make(rid, [1, 2, rid, *range(3, length)]))
    compute(watched.kv, make(0, [1, 2]))
    sizes = []
    while found := watched.refresh():
        sizes.append(len(found))
    assert sum(sizes) == count
    assert max(sizes) <= most
    assert set(watched.known.values()) == {2}


def test_who_is_left_over_by_a_step_may_leave_before_the_next() -> None:
    watched = Watched(1)
    for rid in range(1, 601):
        watched.add(make(rid, [1, 2, rid]))
    compute(watched.kv, make(0, [1, 2]))
    looked_up = watched.refresh()
    assert 0 < len(looked_up) < 600
    for rid in set(watched.reqs) - set(looked_up):
        watched.drop(watched.reqs[rid])
    assert watched.refresh() == []
    for rid in looked_up:
        watched.drop(watched.reqs[rid])
    assert not watched.index._spots
