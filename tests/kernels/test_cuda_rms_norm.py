"""The Triton kernel of rms_norm, interpreted, against its reference."""

import pytest
import torch
from support.interpreted import as_if_on_device

from tokenloom.kernels.rms_norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_on_device(monkeypatch)


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
    check(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_and_kept(dtype: torch.dtype) -> None:
    x, weight = random(3, 33, dtype=dtype), random(33, dtype=dtype)
    residual = random(33, 3, dtype=dtype).reshape(3, 33)
    expected_sum = x.float() + residual.float()
    out = rms_norm(x, weight, 1e-5, residual)
    check(residual, expected_sum)
    check(out, rms_norm_reference(residual, weight, 1e-5))


def test_heads_of_a_wider_tensor_in_place() -> None:
    whole, weight = random(4, 9, 12), random(12)
    before = whole.clone()
    heads = whole[:, 2:5]
    assert rms_norm(heads, weight, 1e-6, out=heads) is heads
    check(heads, rms_norm_reference(before[:, 2:5], weight, 1e-6))
    for untouched in (slice(0, 2), slice(5, 9)):
        assert torch.equal(whole[:, untouched], before[:, untouched])


def test_a_row_is_the_same_in_any_batch() -> None:
    x, weight = random(5, 48), random(48)
    together, alone = rms_norm(x, weight, 1e-5), rms_norm(x[3:4], weight, 1e-5)
    assert torch.equal(together[3:4], alone)
