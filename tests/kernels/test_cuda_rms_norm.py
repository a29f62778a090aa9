"""The Triton kernel of rms_norm, interpreted, against its reference."""

import pytest
import torch

from tokenloom.kernels.cuda.rms_norm import rms_norm
from tokenloom.kernels.rms_norm import rms_norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 7), (1, 60), (3, 700), (2, 11, 80), (2, 0, 8)])
def test_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    out = torch.full(shape, torch.nan, dtype=dtype)
    rms_norm(x, weight, 1e-5, None, out)
    check(out, rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_and_kept(dtype: torch.dtype) -> None:
    x, weight = random(3, 33, dtype=dtype), random(33, dtype=dtype)
    residual = random(33, 3, dtype=dtype).reshape(3, 33)
    expected_sum = x.float() + residual.float()
    out = torch.full((3, 33), torch.nan, dtype=dtype)
    rms_norm(x, weight, 1e-5, residual, out)
    check(residual, expected_sum)
    check(out, rms_norm_reference(residual, weight, 1e-5))


def test_heads_of_a_wider_tensor_in_place() -> None:
    whole, weight = random(4, 9, 12), random(12)
    before = whole.clone()
    heads = whole[:, 2:5]
    rms_norm(heads, weight, 1e-6, None, heads)
    check(heads, rms_norm_reference(before[:, 2:5], weight, 1e-6))
    for untouched in (slice(0, 2), slice(5, 9)):
        assert torch.equal(whole[:, untouched], before[:, untouched])


def test_a_row_is_the_same_in_any_batch() -> None:
    x, weight = random(5, 48), random(48)
    together, alone = torch.empty(5, 48), torch.empty(1, 48)
    rms_norm(x, weight, 1e-5, None, together)
    rms_norm(x[3:4], weight, 1e-5, None, alone)
    assert torch.equal(together[3:4], alone)
