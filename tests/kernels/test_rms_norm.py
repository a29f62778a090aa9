"""rms_norm against its reference, with and without the residual add."""

import pytest
import torch

from tokenloom.kernels.rms_norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 7), (1, 60), (5, 33), (3, 5, 12)])
def test_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    expected = rms_norm_reference(x, weight, 1e-5)
    tolerance = TOLERANCE[dtype]
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_residual_is_added_and_kept(dtype: torch.dtype) -> None:
    x, weight = random(5, 33, dtype=dtype), random(33, dtype=dtype)
    residual = random(33, 5, dtype=dtype).reshape(5, 33)
    expected_sum = x + residual
    expected = rms_norm_reference(expected_sum, weight, 1e-5)
    result = rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(residual, expected_sum, atol=0, rtol=0)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_result_may_replace_the_input(dtype: torch.dtype) -> None:
    x, weight = random(5, 33, dtype=dtype), random(33, dtype=dtype)
    residual = random(33, 5, dtype=dtype).reshape(5, 33)
    expected = rms_norm(x.clone(), weight, 1e-5, residual.clone())
    assert rms_norm(x, weight, 1e-5, residual, out=x) is x
    assert torch.equal(x, expected)


def test_heads_of_a_wider_tensor() -> None:
    heads = random(4, 9, 12)[:, 2:5]
    weight = random(12)
    torch.testing.assert_close(
        rms_norm(heads, weight, 1e-6), rms_norm_reference(heads, weight, 1e-6)
    )


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"weight \(4,\) does not fit"):
        rms_norm(random(2, 5), random(4), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        rms_norm(random(2, 5), random(5), 1e-5, random(3, 5))
    with pytest.raises(ValueError, match="out"):
        rms_norm(random(2, 5), random(5), 1e-5, out=random(2, 5, dtype=torch.bfloat16))
