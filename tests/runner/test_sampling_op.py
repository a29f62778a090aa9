"""kernels/sampling.py: the formulas, the draw against the softmax, the uniforms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenloom.kernels.sampling import (
    Draw,
    choose,
    gumbel,
    largest,
    nucleus,
    penalise,
    stream_key,
    uniform,
)

VOCAB = 1000


def draw(logits: torch.Tensor, how: Draw) -> int:
    return choose([logits], [how])[0]


def how(
    temperature: float = 1.0,
    *,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, position)


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def support(logits: torch.Tensor, make: Callable[[int], Draw], draws: int = 300) -> set[int]:
    return {draw(logits, make(position)) for position in range(draws)}


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.5, 0.0])
    counts = torch.tensor([0.0, 0.0, 3.0, 1.0, 0.0, 0.0])
    seen = torch.tensor([True, True, True, True, False, False])
    out = penalise(logits, counts, seen, (1.25, 0.5, 0.25))
    expected = [
        2.0 / 1.25,
        -2.0 * 1.25,
        2.0 / 1.25 - 3 * 0.5 - 0.25,
        -2.0 * 1.25 - 1 * 0.5 - 0.25,
        0.5,
        0.0,
    ]
    assert out.tolist() == pytest.approx(expected)
    assert logits[0] == 2.0  # the input is left alone


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = random_logits(0)
    ids = torch.tensor([5, 7, 7, 900, 0])
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[ids] = True
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids[None], logits[None].clone())[0]
    out = penalise(logits, torch.zeros(VOCAB), seen, (1.3, 0.0, 0.0))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [2, 5, 999])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    logits = random_logits(1)
    expected = TopKLogitsWarper(k)(None, logits[None].clone())[0].isfinite().nonzero().squeeze(-1)
    assert largest(logits, k).tolist() == expected.tolist()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0])  # nearly flat: the nucleus is wide
def test_top_p_keeps_what_transformers_keeps(p: float, spread: float) -> None:
    logits = spread * random_logits(2, 6000)
    expected = TopPLogitsWarper(p)(None, logits[None].clone())[0].isfinite().nonzero().squeeze(-1)
    kept = set(nucleus(logits, p).tolist())
    # transformers sums in float32: the last id or two at the border may differ
    assert len(kept ^ set(expected.tolist())) <= max(1, expected.numel() // 1000)


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5])
def test_min_p_draws_only_what_transformers_keeps(p: float) -> None:
    logits = random_logits(3, 20) / 3
    expected = MinPLogitsWarper(p)(None, logits[None].clone())[0].isfinite().nonzero().squeeze(-1)
    drawn = support(logits, lambda i: how(min_p=p, position=i), 3000)
    likely = (logits.softmax(-1) > 0.005).nonzero().squeeze(-1)
    assert drawn <= set(expected.tolist())
    assert drawn >= set(expected.tolist()) & set(likely.tolist())


def test_of_ties_the_lowest_ids_are_kept() -> None:
    ties = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    assert largest(ties, 1).tolist() == [1]
    assert largest(ties, 2).tolist() == [1, 4]
    assert largest(ties, 4).tolist() == [0, 1, 2, 4]
    assert largest(ties, 6).tolist() == [0, 1, 2, 3, 4, 5]
    flat = torch.zeros(10)
    assert support(flat, lambda i: how(top_k=3, position=i)) == {0, 1, 2}
    assert support(flat, lambda i: how(top_p=0.5, position=i)) == {0, 1, 2, 3, 4}
    assert support(flat, lambda i: how(min_p=1.0, position=i)) == set(range(10))


def test_top_p_works_on_what_top_k_left_and_before_min_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # alone, 0.7 of the mass needs two ids; of the best two, 0.57 is in the first alone
    assert support(logits, lambda i: how(top_p=0.69, position=i)) == {0, 1}
    assert support(logits, lambda i: how(top_k=2, top_p=0.57, position=i)) == {0}
    # renormalised after min_p, 0.4 / 0.7 would reach 0.5 with the first id
    assert support(logits, lambda i: how(top_p=0.5, min_p=0.7, position=i)) == {0, 1}


def test_temperature_comes_before_the_filters() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert support(logits, lambda i: how(top_p=0.5, position=i)) == {0}
    assert support(logits, lambda i: how(5.0, top_p=0.5, position=i)) == {0, 1}
    assert support(logits, lambda i: how(min_p=0.7, position=i)) == {0}
    assert support(logits, lambda i: how(5.0, min_p=0.7, position=i)) == {0, 1, 2}


def test_filters_that_are_off_or_wider_than_the_vocabulary_change_nothing() -> None:
    logits = random_logits(4)
    for position in range(50):
        alone = draw(logits, how(position=position))
        for top_k in (0, -1, VOCAB, VOCAB + 1, (1 << 31) - 1):
            assert draw(logits, how(top_k=top_k, position=position)) == alone


@pytest.mark.parametrize("filters", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_tightest_filter_leaves_the_likeliest_id(filters: dict[str, float]) -> None:
    logits = random_logits(5)
    for seed in range(20):
        wish = Draw(**({"temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters),
                    seed=seed, position=0)  # fmt: skip
        assert draw(logits, wish) == int(logits.argmax())


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Normal deviate of the chi-square statistic (Wilson and Hilferty 1931); ids under 5 pooled."""
    expected = probs.double() * counts.sum()
    rare = expected < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].double().sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = wanted > 0
    statistic = float(((seen - wanted)[used] ** 2 / wanted[used]).sum())
    k = int(used.sum()) - 1
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [
        (1.0, {}),
        (0.5, {}),
        (3.0, {}),
        (1.0, {"top_k": 10}),
        (1.0, {"top_p": 0.8}),
        (1.0, {"min_p": 0.1}),
        (1.0, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    ],
)
@pytest.mark.parametrize("varying", ["seed", "position"])
def test_draws_are_distributed_as_the_softmax(
    temperature: float, filters: dict[str, float], varying: str
) -> None:
    logits = random_logits(6, 60) / 2
    counts = torch.zeros(60)
    base = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": 12345, "position": 7} | filters
    for i in range(6000):
        counts[draw(logits, Draw(temperature, **(base | {varying: i})))] += 1
    wanted = (logits / temperature).softmax(-1)
    if "top_k" in filters:
        wanted = wanted * (wanted >= wanted.sort().values[-int(filters["top_k"])])
        wanted = wanted / wanted.sum()
    if "top_p" in filters:
        ordered, ids = wanted.sort(descending=True)
        wanted[ids[ordered.cumsum(0) - ordered >= filters["top_p"]]] = 0
        wanted = wanted / wanted.sum()
    if "min_p" in filters:
        wanted = wanted * (wanted >= filters["min_p"] * wanted.max())
        wanted = wanted / wanted.sum()
    assert (counts > 0)[wanted == 0].sum() == 0
    assert abs(chi_square(counts, wanted)) < 3.5


@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(7)
    logits[3] = 1e30
    assert {draw(logits, how(temperature, seed=s)) for s in range(20)} == {3}
    assert draw(-logits, how(temperature)) == int((-logits).argmax())


def test_banned_ids_are_never_drawn_at_any_temperature() -> None:
    logits = torch.full((50,), -math.inf)
    logits[[7, 8]] = torch.tensor([1.0, 0.0])
    assert support(logits, lambda i: how(100.0, position=i)) == {7, 8}
    wide = lambda i: how(100.0, top_k=10, top_p=0.999, min_p=1e-9, position=i)  # noqa: E731
    assert support(logits, wide) == {7, 8}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.floats(1e-5, 100.0),
    st.integers(-1, (1 << 31) - 1),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, 1 << 20),
)
def test_every_valid_wish_yields_an_id(
    values: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    logits = torch.tensor(values)
    wish = Draw(temperature, top_k, top_p, min_p, seed, position)
    assert 0 <= draw(logits, wish) < len(values)
    assert draw(logits, wish) == draw(logits.clone(), wish)


def table_of_uniforms(seeds: range, positions: range, ids: int) -> np.ndarray:
    token_ids = torch.arange(ids, dtype=torch.int32)
    return np.array(
        [[uniform(token_ids, stream_key(s, p)).numpy() for p in positions] for s in seeds],
        dtype=np.float64,
    )


def test_uniforms_lie_inside_0_and_1_and_are_pinned() -> None:
    """The pinned values make a change of the generator a decision: it changes seeded answers."""
    u = uniform(torch.arange(1 << 20, dtype=torch.int32), stream_key(1, 2))
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    assert gumbel(torch.arange(1 << 20, dtype=torch.int32), stream_key(1, 2)).isfinite().all()
    few = uniform(torch.tensor([0, 1, 49151], dtype=torch.int32), stream_key(-1, 0))
    assert few.tolist() == pytest.approx([0.10568889, 0.97211528, 0.54206496], abs=1e-7)


def test_uniforms_are_uniform_along_every_axis() -> None:
    table = table_of_uniforms(range(50), range(50), 40)
    n = table.size
    assert abs(table.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(table.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    for axis in range(3):
        others = table.size / table.shape[axis]
        means = table.mean(axis=tuple({0, 1, 2} - {axis}))
        assert np.abs(means - 0.5).max() < 5 * math.sqrt(1 / 12 / others)
    bins = np.histogram(table, bins=64, range=(0, 1))[0]
    assert abs(chi_square(torch.tensor(bins), torch.full((64,), 1 / 64))) < 3.5


@pytest.mark.slow
def test_small_uniforms_are_as_frequent_as_they_should() -> None:
    """Coarse numbers near 0, where the noise is largest, would favour or forbid unlikely tokens."""
    ids = torch.arange(1 << 20, dtype=torch.int32)
    table = torch.stack([uniform(ids, stream_key(3, position)) for position in range(16)])
    for exponent in (-10, -14, -18, -21):
        expected = table.numel() * 2.0**exponent
        assert abs(float((table < 2.0**exponent).sum()) - expected) < 4 * math.sqrt(expected)


def test_the_noise_is_gumbel() -> None:
    noise = gumbel(torch.arange(1 << 20, dtype=torch.int32), stream_key(3, 3)).double()
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.015)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "token"])
@pytest.mark.parametrize("lag", [1, 2, 7, 16])
def test_neighbours_are_not_correlated(axis: int, lag: int) -> None:
    table = table_of_uniforms(range(40), range(40), 40)
    here = np.take(table, range(40 - lag), axis=axis).ravel() - 0.5
    there = np.take(table, range(lag, 40), axis=axis).ravel() - 0.5
    assert abs((here * there).mean() * 12) < 4 / math.sqrt(here.size)


def test_streams_of_different_seeds_differ_and_equal_ones_agree() -> None:
    ids = torch.arange(64, dtype=torch.int32)
    keys = [stream_key(s, p) for s in (-(1 << 63), -1, 0, 1, (1 << 63) - 1) for p in range(20)]
    assert len(set(keys)) == len(keys)
    assert len({tuple(uniform(ids, key).tolist()) for key in keys}) == len(keys)
    assert torch.equal(uniform(ids, keys[3]), uniform(ids, keys[3]))
    # a token's number does not depend on which others are asked for
    assert torch.equal(uniform(ids[10:20], keys[5]), uniform(ids, keys[5])[10:20])
