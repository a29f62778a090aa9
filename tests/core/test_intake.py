"""What the second wall makes of borders; the refusals one by one are in test_scheduler.py."""

from array import array

import pytest

from tokenloom.scheduler_proc.core.intake import Limits, make_req
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.messages import TokenizedGenerateReq
from tokenloom.wire.sampling import InvalidRequest, SamplingParams

EOS = 2


def intake(ids: list[int], *, context: int = 20, pool: int = 30, **sampling: object) -> Req:
    params = SamplingParams(seed=1, **sampling)  # type: ignore[arg-type]
    message = TokenizedGenerateReq(7, array("i", ids).tobytes(), params)
    return make_req(message, 3, Limits(10, context, pool, frozenset({EOS})))


def test_a_request_as_it_came() -> None:
    req = intake([0, 9, 4], max_new_tokens=5)
    assert (req.rid, req.arrival, list(req.ids), req.prompt_len) == (7, 3, [0, 9, 4], 3)
    assert (req.max_new_tokens, req.output_len, req.tokens_left) == (5, 0, 5)
    assert (req.retractions, req.cached_tokens, req.admitted, req.announced) == (0, 0, False, False)


@pytest.mark.parametrize(("ids", "wrong"), [([1, 10], 10), ([0, 11, 3], 11), ([4, -1, 10], -1)])
def test_any_id_may_be_the_wrong_one(ids: list[int], wrong: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token id {wrong} is outside 0\.\.9"):
        intake(ids)


def test_the_answer_fills_what_is_left_of_the_smaller_of_context_and_pool() -> None:
    assert intake([1] * 19).max_new_tokens == 1
    assert intake([1] * 5, context=50).max_new_tokens == 25
    assert intake([1] * 5, max_new_tokens=16).max_new_tokens == 15
    for context, pool in ((20, 30), (30, 20)):
        with pytest.raises(InvalidRequest, match="has 20 tokens and leaves no room"):
            intake([1] * 20, context=context, pool=pool)


def test_stop_ids_are_the_request_s_own_and_the_model_s_unless_ignored() -> None:
    assert intake([1], stop_token_ids=(5,)).stop_ids == {5, EOS}
    assert intake([1], stop_token_ids=(5,), ignore_eos=True).stop_ids == {5}
