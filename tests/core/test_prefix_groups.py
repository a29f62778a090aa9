"""Whose prompt is being computed for whom: the borders of a shared prefix."""

from array import array

import pytest

from tokenloom.scheduler_proc.core.prefix_groups import PrefixLeaders
from tokenloom.scheduler_proc.core.radix_cache import RadixCache
from tokenloom.scheduler_proc.core.req import Req, ReqKV
from tokenloom.wire.sampling import SamplingParams


def make(ids: list[int], namespace: str = "") -> Req:
    req = Req(1, 1, SamplingParams(), array("i", ids), len(ids), 1, frozenset())
    req.namespace = namespace
    return req


def leading(ids: list[int], computed: int = 0, namespace: str = "") -> Req:
    req = make(ids, namespace)
    req.kv = ReqKV(0, [], 0, RadixCache(1).root, computed, landed=computed)
    return req


def leaders(tokens: int, page_size: int, *reqs: Req) -> PrefixLeaders:
    found = PrefixLeaders(tokens, page_size)
    for req in reqs:
        found.add(req)
    return found


@pytest.mark.parametrize(("shared", "waits"), [(3, False), (4, True), (9, True)])
def test_from_so_many_tokens_on(shared: int, waits: bool) -> None:
    group = leaders(4, 1, leading([1] * 10))
    assert (group.held_from(make([1] * shared + [2] * 5)) is not None) == waits


@pytest.mark.parametrize(("shared", "waits"), [(5, False), (7, False), (8, True)])
def test_pages_are_whole(shared: int, waits: bool) -> None:
    """Five tokens are two pages of four: less would give no hit of that length."""
    group = leaders(5, 4, leading([1] * 12))
    assert (group.held_from(make([1] * shared + [2] * 5)) is not None) == waits


def test_who_needs_the_last_of_these_tokens_itself_does_not_wait() -> None:
    group = leaders(4, 4, leading([1] * 12))
    assert group.held_from(make([1] * 4)) is None
    assert group.held_from(make([1] * 5)) == 0


def test_what_is_cached_must_be_shared_too() -> None:
    group = leaders(4, 1, leading([7, 7, 1, 1, 1, 1, 1], computed=2))
    assert group.held_from(make([7, 7, 1, 1, 1, 1, 5])) == 2
    assert group.held_from(make([7, 8, 1, 1, 1, 1, 5])) is None
    assert group.held_from(make([7, 7, 1, 1, 5, 5, 5])) is None


def test_a_leader_with_too_little_left_leads_nobody() -> None:
    group = leaders(4, 1, leading([1] * 10, computed=7))
    assert group.held_from(make([1] * 20)) is None


def test_a_leader_with_just_enough_left_leads() -> None:
    group = leaders(4, 1, leading([1] * 4))
    assert group.held_from(make([1] * 4 + [2])) == 0


def test_namespaces_do_not_share() -> None:
    group = leaders(4, 1, leading([1] * 10, namespace="a"))
    assert group.held_from(make([1] * 10, "a")) == 0
    assert group.held_from(make([1] * 10, "b")) is None


def test_zero_is_never() -> None:
    assert leaders(0, 1, leading([1] * 10)).held_from(make([1] * 10)) is None


def test_one_of_several_leaders_is_enough() -> None:
    group = leaders(2, 1, leading([1, 1, 2]), leading([3, 3, 2]), leading([3, 3, 1], computed=1))
    assert group.held_from(make([3, 3, 3])) == 0
    assert group.held_from(make([4, 3, 1, 1])) is None
