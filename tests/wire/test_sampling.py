"""Every bound of SamplingParams: the last value inside it, the first one outside, and its name."""

import math

import pytest

from tokenloom.wire.sampling import InvalidRequest, SamplingParams, check_sampling

VOCAB = 100
INF, NAN = math.inf, math.nan

INSIDE = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": (1 << 31) - 1},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 10.0},
    {"max_new_tokens": 1},
    {"max_new_tokens": (1 << 31) - 1},
    {"min_new_tokens": 3, "max_new_tokens": 3},
    {"min_new_tokens": 3},
    {"logit_bias": {0: -100.0, VOCAB - 1: 100.0}},
    {"logit_bias": {}},
    {"stop": ("x" * 256,) * 16},
    {"stop_token_ids": (0,) * 63 + (VOCAB - 1,)},
    {"seed": -(1 << 63)},
    {"seed": (1 << 63) - 1},
]
OUTSIDE = [
    ("temperature", -0.001),
    ("temperature", 100.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_k", -2),
    ("top_k", 1 << 31),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.001),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("presence_penalty", 2.1),
    ("presence_penalty", INF),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 10.1),
    ("repetition_penalty", NAN),
    ("max_new_tokens", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 1 << 31),
    ("min_new_tokens", -1),
    ("logit_bias", dict.fromkeys(range(301), 0.0)),
    ("logit_bias", {VOCAB: 0.0}),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: -INF}),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("x",) * 17),
    ("stop_token_ids", (VOCAB,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * 65),
    ("seed", 1 << 63),
    ("seed", -(1 << 63) - 1),
]


@pytest.mark.parametrize("fields", INSIDE)
def test_the_last_values_inside_a_bound_pass(fields: dict[str, object]) -> None:
    check_sampling(SamplingParams(**fields), VOCAB)


@pytest.mark.parametrize(("field", "value"), OUTSIDE)
def test_the_first_values_outside_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sampling(SamplingParams(**{field: value}), VOCAB)
    assert refused.value.param == field
    assert field.removesuffix("_token_ids") in refused.value.message
    assert len(refused.value.message) < 200


def test_more_tokens_asked_than_allowed() -> None:
    with pytest.raises(InvalidRequest, match=r"min_new_tokens \(4\) is above max_new_tokens \(3\)"):
        check_sampling(SamplingParams(min_new_tokens=4, max_new_tokens=3), VOCAB)


def test_every_field_has_a_bound_or_needs_none() -> None:
    free = {"ignore_eos", "skip_special_tokens", "no_stop_trim"}
    assert {field for field, _ in OUTSIDE} | free == set(SamplingParams.__struct_fields__)


def test_greedy_and_penalised() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    assert not SamplingParams().penalised
    for field in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert SamplingParams(**{field: 0.5}).penalised
