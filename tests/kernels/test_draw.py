"""The native draw against its reference: the same ids on every instruction set of this machine."""

import pytest
import torch

from tokenloom.kernels.cpu import native
from tokenloom.kernels.sampling import Draw, draw, draw_reference, stream_key

LIBRARY = native.load()
_MASK = (1 << 32) - 1


def native_draw(logits: torch.Tensor, temperature: float, key: tuple[int, int], isa: int) -> int:
    top = float(logits.amax())
    first, second = key[0] & _MASK, key[1] & _MASK
    got = LIBRARY.tl_draw(logits.data_ptr(), logits.numel(), top, temperature, first, second, isa)
    return int(got)


@pytest.mark.parametrize("isa", range(LIBRARY.tl_best_isa() + 1))
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49152])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 100.0])
def test_the_same_ids_as_the_reference(isa: int, vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for seed in range(40):
        logits = torch.randn(vocab, generator=generator) * 4
        key = stream_key(seed, seed * 3)
        assert native_draw(logits, temperature, key, isa) == draw_reference(
            logits, temperature, key
        )


@pytest.mark.parametrize("isa", range(LIBRARY.tl_best_isa() + 1))
def test_a_banned_id_is_never_drawn(isa: int) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[3, 40]] = torch.tensor([0.0, -80.0])
    drawn = {native_draw(logits, 50.0, stream_key(seed, 0), isa) for seed in range(200)}
    assert drawn == {3, 40}


def test_draw_takes_the_native_path_for_a_slice_of_a_wider_row() -> None:
    wide = torch.randn(2, 120, generator=torch.Generator().manual_seed(1))
    for position in range(50):
        how = Draw(0.8, -1, 1.0, 0.0, seed=4, position=position)
        expected = draw_reference(wide[1, :97], 0.8, stream_key(4, position))
        assert draw(wide[1, :97], how) == expected
