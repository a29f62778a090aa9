"""The sampler's rows: every parameter has its effect, and no row feels its neighbours."""

import math
from array import array
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.scheduler_proc.runner.sampler import FAILED, Sampler
from tokenloom.scheduler_proc.worker_batch import RowOpen
from tokenloom.wire.sampling import SamplingParams, check_sampling

VOCAB = 200


def opened(
    row: int,
    sampling: SamplingParams,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    banned: tuple[int, ...] = (),
) -> RowOpen:
    check_sampling(sampling, VOCAB)
    return RowOpen(row, sampling, array("i", prompt), array("i", output), banned)


def script(step: int, variant: int = 0) -> torch.Tensor:
    """The logits [VOCAB] of a step, as if from a model."""
    generator = torch.Generator().manual_seed(1000 * variant + step)
    return 2 * torch.randn(VOCAB, generator=generator)


def answer(wish: RowOpen, steps: int = 12, variant: int = 0) -> list[int]:
    """What the request gets alone."""
    sampler = Sampler(wish.row + 1, VOCAB)
    sampler.open(wish)
    start = len(wish.output_ids)
    return [
        sampler.sample(script(step, variant)[None], [wish.row])[0]
        for step in range(start, start + steps)
    ]


def one(logits: Sequence[float], sampling: SamplingParams, **ids: Sequence[int]) -> int:
    sampler = Sampler(1, len(logits))
    wish = RowOpen(
        0,
        sampling,
        array("i", ids.get("prompt", ())),
        array("i", ids.get("output", ())),
        tuple(ids.get("banned", ())),
    )
    sampler.open(wish)
    return sampler.sample(torch.tensor([logits]), [0])[0]


GREEDY = SamplingParams(temperature=0.0)


def greedy(**fields: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **fields)


def test_greedy_takes_the_largest_and_of_ties_the_lowest_id() -> None:
    assert one([0.0, 3.0, 1.0], GREEDY) == 1
    assert one([0.0, 3.0, 3.0], GREEDY) == 1
    assert one([0.0, 3.0, 3.0], greedy(presence_penalty=0.5)) == 1
    assert one([0.0, 3.0, 1.0], SamplingParams(top_k=1, temperature=100.0)) == 1


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-38, 1e-6, 1e-5, 1e-4, 1e-2])
def test_a_tiny_temperature_equals_greedy(temperature: float) -> None:
    for step in range(5):
        logits = script(step)
        logits[7] = logits.max() + 1.0
        assert one(logits.tolist(), SamplingParams(temperature=temperature, seed=step)) == 7


@pytest.mark.parametrize(
    ("penalty", "prompt", "output", "winner"),
    [
        # logits 2.0, 1.5, -0.1 : id 0 wins until its penalty exceeds 0.5
        ({"presence_penalty": 0.4}, [], [0, 0], 0),
        ({"presence_penalty": 0.6}, [], [0, 0], 1),
        ({"presence_penalty": 0.6}, [0, 0], [], 0),  # the prompt does not count
        ({"presence_penalty": -0.6}, [], [1], 1),
        ({"frequency_penalty": 0.3}, [], [0], 0),
        ({"frequency_penalty": 0.3}, [], [0, 0], 1),
        ({"frequency_penalty": 0.3}, [0, 0], [], 0),
        ({"repetition_penalty": 1.3}, [], [0], 0),  # 2 / 1.3 = 1.54
        ({"repetition_penalty": 1.35}, [], [0], 1),  # 2 / 1.35 = 1.48
        ({"repetition_penalty": 1.35}, [0], [], 1),  # the prompt counts
        ({"repetition_penalty": 1.35}, [0], [0, 0], 1),
        ({"repetition_penalty": 1.2}, [0], [0, 0], 0),  # applied once: 1.67; squared: 1.39
        ({"repetition_penalty": 0.7}, [1], [], 1),  # 1.5 / 0.7 = 2.14
    ],
)
def test_penalties_have_the_effect_of_their_formula(
    penalty: dict[str, float], prompt: list[int], output: list[int], winner: int
) -> None:
    assert one([2.0, 1.5, -0.1], greedy(**penalty), prompt=prompt, output=output) == winner


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    assert one([-1.0, -1.1], greedy(repetition_penalty=1.2), prompt=[0]) == 1


def test_penalties_follow_what_is_sampled() -> None:
    """A repeating winner loses 0.5 each time it is drawn: 0 at 1.0, 0.5, then id 1 at 0.4."""
    sampler = Sampler(1, 3)
    sampler.open(RowOpen(0, greedy(frequency_penalty=0.5), array("i"), array("i"), ()))
    logits = torch.tensor([[1.0, 0.4, -9.0]])
    assert [sampler.sample(logits, [0])[0] for _ in range(5)] == [0, 0, 1, 0, 1]


def test_logit_bias_is_added() -> None:
    assert one([2.0, 1.5], greedy(logit_bias={1: 0.4})) == 0
    assert one([2.0, 1.5], greedy(logit_bias={1: 0.6})) == 1
    assert one([2.0, 1.5], greedy(logit_bias={0: -100.0})) == 1
    assert one([2.0, 1.5], greedy(logit_bias={})) == 0


def test_bias_of_minus_100_on_everything_keeps_the_order() -> None:
    bias = dict.fromkeys(range(VOCAB), -100.0)
    for temperature in (0.0, 1e-4, 1.0, 100.0):
        sampling = SamplingParams(temperature=temperature, seed=1, logit_bias=bias)
        plain = SamplingParams(temperature=temperature, seed=1)
        assert one(script(0).tolist(), sampling) == one(script(0).tolist(), plain)


def test_every_banned_id_is_masked_until_min_new_tokens() -> None:
    sampling = greedy(min_new_tokens=3)
    sampler = Sampler(1, 5)
    sampler.open(RowOpen(0, sampling, array("i", [1]), array("i"), (2, 4)))
    logits = torch.tensor([[0.0, 0.5, 3.0, 1.0, 2.0]])
    assert [sampler.sample(logits, [0])[0] for _ in range(5)] == [3, 3, 3, 2, 2]
    # after a retraction the tokens generated before it count
    sampler.open(RowOpen(0, sampling, array("i", [1]), array("i", [3, 3]), (2, 4)))
    assert [sampler.sample(logits, [0])[0] for _ in range(3)] == [3, 2, 2]


def test_bans_hold_for_draws_and_beat_a_bias() -> None:
    sampling = SamplingParams(temperature=100.0, seed=3, min_new_tokens=50, logit_bias={2: 100.0})
    wish = opened(0, sampling, banned=(2, 7))
    assert not {2, 7} & set(answer(wish, 50))


def test_a_banned_id_beyond_the_vocabulary_is_harmless() -> None:
    wish = RowOpen(0, greedy(min_new_tokens=1), array("i"), array("i"), (1, 77))
    sampler = Sampler(1, 3)
    sampler.open(wish)
    assert sampler.sample(torch.tensor([[0.0, 2.0, 1.0]]), [0]) == [2]


def test_ids_that_the_tokenizer_does_not_know_are_never_sampled() -> None:
    logits = torch.full((2, 10), 50.0)
    logits[:, :3] = torch.tensor([0.0, 2.0, 1.0])
    sampler = Sampler(2, 3)
    sampler.open(RowOpen(0, GREEDY, array("i"), array("i"), ()))
    sampler.open(RowOpen(1, SamplingParams(temperature=100.0, seed=1), array("i"), array("i"), ()))
    for _ in range(50):
        first, second = sampler.sample(logits, [0, 1])
        assert first == 1
        assert 0 <= second < 3
    logits[:, 3:] = math.nan
    assert sampler.sample(logits, [0, 1])[0] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.3},
        {"top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"seed": 43},
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {5: 100.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_parameter_reaches_the_draw(fields: dict[str, object]) -> None:
    plain = SamplingParams(seed=42)
    changed = msgspec.structs.replace(plain, **fields)
    assert answer(opened(0, plain), 40) != answer(opened(0, changed), 40)


def test_equal_seeds_agree_and_tokens_vary_over_positions() -> None:
    wish = opened(0, SamplingParams(seed=42, temperature=5.0))
    assert answer(wish, 40) == answer(wish, 40)
    sampler = Sampler(1, VOCAB)
    sampler.open(wish)
    same_logits = [sampler.sample(script(0)[None], [0])[0] for _ in range(40)]
    assert len(set(same_logits)) > 20


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1), greedy(presence_penalty=1)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, sampling: SamplingParams) -> None:
    sampler = Sampler(3, VOCAB)
    for row in range(3):
        sampler.open(opened(row, sampling))
    logits = torch.stack([script(0), script(0), script(0)])
    logits[1, 17] = bad
    first, broken, last = sampler.sample(logits, [0, 1, 2])
    assert broken == FAILED == -1
    assert first == last == answer(opened(0, sampling), 1)[0]


def test_a_row_without_any_candidate_fails() -> None:
    assert one([-math.inf, -math.inf], GREEDY) == FAILED
    assert one([-math.inf, -math.inf], SamplingParams(seed=1)) == FAILED
    assert one([1.0, 2.0], greedy(min_new_tokens=1), banned=[0, 1]) == FAILED
    assert one([-math.inf, -3e38], SamplingParams(seed=1, temperature=1e-4)) == 1


def test_penalties_that_overflow_fail_the_row() -> None:
    assert one([3e38, 0.0], greedy(repetition_penalty=0.01), prompt=[0]) == FAILED


def test_no_rows_give_no_ids() -> None:
    assert Sampler(1, VOCAB).sample(torch.empty(0, VOCAB), []) == []


def test_misuse_is_an_error() -> None:
    sampler = Sampler(2, VOCAB)
    with pytest.raises(ValueError, match="row 1 was opened without a seed"):
        sampler.open(opened(1, SamplingParams()))
    with pytest.raises(ValueError, match="row 0 samples but was never opened"):
        sampler.sample(torch.zeros(1, VOCAB), [0])


@st.composite
def wishes(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.5, 1.0, 3.0, 100.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 5, VOCAB - 1, VOCAB, 9_999_999])),
        top_p=draw(st.sampled_from([1e-9, 0.3, 0.95, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 0.5])),
        logit_bias=draw(st.sampled_from([None, {3: 5.0, 10: -100.0}])),
        min_new_tokens=draw(st.sampled_from([0, 4])),
        seed=draw(st.sampled_from([-(1 << 63), 0, 42, (1 << 63) - 1])),
    )


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(wishes(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_gets_the_same_ids_in_any_crowd_and_order(
    crowd: list[SamplingParams], random: Random
) -> None:
    prompts = [list(range(1, random.choice([2, 40]))) for _ in crowd]
    rows = random.sample(range(8), len(crowd))
    alone = [
        answer(opened(0, wish, prompt, banned=(2, 7)), 8, variant)
        for variant, (wish, prompt) in enumerate(zip(crowd, prompts, strict=True))
    ]
    sampler = Sampler(8, VOCAB)
    for row, wish, prompt in zip(rows, crowd, prompts, strict=True):
        sampler.open(opened(row, wish, prompt, banned=(2, 7)))
    together: list[list[int]] = [[] for _ in crowd]
    while any(len(ids) < 8 for ids in together):
        # any subset steps, in any order
        batch = [k for k in range(len(crowd)) if len(together[k]) < 8 and random.random() < 0.7]
        random.shuffle(batch)
        if batch:
            logits = torch.stack([script(len(together[k]), k) for k in batch])
            for k, token in zip(
                batch, sampler.sample(logits, [rows[k] for k in batch]), strict=True
            ):
                together[k].append(token)
    assert together == alone


@settings(derandomize=True, deadline=None, max_examples=60)
@given(wishes(), st.integers(0, 10))
def test_a_retraction_changes_nothing(wish: SamplingParams, retracted_at: int) -> None:
    """The row is opened again with its output so far, as after a retraction or a restart."""
    whole = answer(opened(0, wish, banned=(2, 7)), 12)
    resumed = opened(0, wish, output=whole[:retracted_at], banned=(2, 7))
    assert answer(resumed, 12 - retracted_at) == whole[retracted_at:]


def test_a_reused_row_forgets_its_former_request() -> None:
    sampler = Sampler(1, VOCAB)
    sampler.open(opened(0, greedy(frequency_penalty=2.0, logit_bias={5: 100.0})))
    for step in range(5):
        sampler.sample(script(step)[None], [0])
    sampler.open(opened(0, SamplingParams(seed=42)))
    got = [sampler.sample(script(step)[None], [0])[0] for step in range(12)]
    assert got == answer(opened(0, SamplingParams(seed=42)), 12)
