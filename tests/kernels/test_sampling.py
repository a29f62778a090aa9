"""The native choice against its reference: the same ids on every instruction set to be had."""

from itertools import product

import pytest
import torch

from tokenloom.kernels import sampling
from tokenloom.kernels.cpu import native
from tokenloom.kernels.sampling import FAILED, Draw, choose, choose_reference

LIBRARY = native.load()
EVERY_ISA = pytest.mark.parametrize("isa", range(LIBRARY.tl_best_isa() + 1))
FILTERS = [
    (-1, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.05),
    (50, 0.95, 0.02),
    (900, 0.999, 0.0),
]


def native_choice(logits: torch.Tensor, how: Draw | None, isa: int) -> int:
    choices = (native.Choice * 1)(sampling._choice(logits, how))
    LIBRARY.tl_choose(choices, 1, 1, isa)
    return int(choices[0].id)


@EVERY_ISA
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49152])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 100.0])
def test_the_same_ids_as_the_reference(isa: int, vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    seeds = range(2 if vocab > 10_000 else 8)
    for seed, (top_k, top_p, min_p) in product(seeds, FILTERS):
        logits = torch.randn(vocab, generator=generator) * 4
        how = Draw(temperature, top_k, top_p, min_p, seed, position=seed * 3)
        assert native_choice(logits, how, isa) == choose_reference(logits, how), how


@EVERY_ISA
@pytest.mark.parametrize("filters", [(-1, 1.0, 0.0), (10, 0.999999, 1e-30), (0, 1.0, 1e-30)])
def test_a_banned_id_is_never_drawn(isa: int, filters: tuple[int, float, float]) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[3, 40]] = torch.tensor([0.0, -80.0])
    drawn = {native_choice(logits, Draw(50.0, *filters, s, 0), isa) for s in range(200)}
    assert drawn == {3, 40}


@EVERY_ISA
@pytest.mark.parametrize("how", [None, Draw(1.0, -1, 1.0, 0.0, 1, 1), Draw(1.0, 5, 0.9, 0.1, 1, 1)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
def test_a_row_without_a_largest_number_fails(
    isa: int, how: Draw | None, bad: float, place: int
) -> None:
    logits = torch.zeros(37)
    logits[place] = bad
    assert native_choice(logits, how, isa) == choose_reference(logits, how) == FAILED
    nothing = torch.full((37,), -torch.inf)
    assert native_choice(nothing, how, isa) == choose_reference(nothing, how) == FAILED


@EVERY_ISA
def test_of_ties_the_lowest_id_is_the_likeliest(isa: int) -> None:
    for size, winner in ((5, 3), (40, 19), (64, 33)):
        logits = torch.zeros(size)
        logits[winner:] = 1.0
        assert native_choice(logits, None, isa) == winner


def test_many_rows_at_once_are_each_chosen_alone() -> None:
    """Slices of wider rows, on several threads."""
    wide = torch.randn(9, 120, generator=torch.Generator().manual_seed(1))
    hows = [None if i % 3 == 0 else Draw(0.8, i % 2 * 7, 1.0, 0.0, i, i) for i in range(9)]
    expected = [choose_reference(row[:97], how) for row, how in zip(wide, hows, strict=True)]
    assert choose(list(wide[:, :97]), hows) == expected
    assert choose([], []) == []
