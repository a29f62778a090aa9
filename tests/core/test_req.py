"""The request's state machine: every pair of states, and the story that an illegal move tells."""

import itertools
from array import array

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.req import _MOVES, IllegalMove, Req, ReqState
from tokenloom.wire.messages import Finish
from tokenloom.wire.sampling import SamplingParams


def make(state: ReqState = ReqState.WAITING, max_new: int = 4) -> Req:
    return Req(7, 1, SamplingParams(), array("i", [5, 6]), 2, max_new, frozenset({0, 9}), state)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ReqState, ReqState)))
def test_moves_follow_the_table(before: ReqState, after: ReqState) -> None:
    req = make(before)
    if after in _MOVES[before]:
        req.move(after, "why")
        assert req.state is after
    else:
        with pytest.raises(IllegalMove, match="request 7"):
            req.move(after, "why")
        assert req.state is before


def test_an_illegal_move_tells_the_story() -> None:
    req = make()
    req.move(ReqState.EXTENDING, "admitted")
    req.move(ReqState.FINISHED, "abort")
    with pytest.raises(IllegalMove, match=r"admitted; .*abort; .*retracted"):
        req.move(ReqState.WAITING, "retracted")


def test_finishes() -> None:
    req = make(max_new=2)
    req.ids.append(3)
    assert req.finish_for(3) is None
    req.ids.append(3)
    assert req.finish_for(3) == Finish("length")
    assert req.finish_for(9) == Finish("stop", matched=9), "a stop token beats the length"


@pytest.mark.parametrize("steps", [0, 1, 3, 99])
def test_every_way_out_ends_in_finished(steps: int) -> None:
    """Aborted while it waits, within its prompt, while it decodes; or by itself."""
    bench = Bench(chunk=32)
    rid = bench.submit(prompt(60), 5, ignore_eos=True)
    req = bench.scheduler._reqs[rid]
    for _ in range(steps):
        bench.step()
    bench.abort(rid)
    assert req.state is ReqState.FINISHED
    assert not req.holds_pages
