"""How far a step goes past a head that does not fit."""

from array import array

import pytest
from support.scheduling import prompt

from tokenloom.scheduler_proc.core.lookahead import Lookahead
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.sampling import SamplingParams


def req(arrival: int) -> Req:
    ids = array("i", prompt(3))
    return Req(arrival, arrival, SamplingParams(), ids, 3, 50, frozenset())


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_are_tried_behind_the_head(depth: int) -> None:
    """Whether they start or do not fit either; those before the head are not counted."""
    look = Lookahead(max_skips=99, depth=depth)
    assert all(look.started() for _ in range(10))
    assert look.did_not_fit(req(1), urgent=False)
    tried = 1
    while look.started() if tried % 2 else look.did_not_fit(req(tried + 1), urgent=False):
        tried += 1
    assert tried == depth


def test_each_that_starts_past_them_counts_for_all_that_were_tried() -> None:
    look, head, other = Lookahead(max_skips=2, depth=99), req(1), req(2)
    assert look.did_not_fit(head, urgent=False)
    assert look.started()
    assert look.did_not_fit(other, urgent=False)
    assert not look.started(), "the head has been passed twice"
    assert (head.skips, other.skips) == (2, 1)
    assert not Lookahead(2, 99).did_not_fit(head, urgent=False), "in the next step, too"


def test_nobody_starts_before_an_urgent_one() -> None:
    assert not Lookahead(9, 9).did_not_fit(req(1), urgent=True)
