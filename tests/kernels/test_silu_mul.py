"""silu_mul against its reference."""

import pytest
import torch

from tokenloom.kernels.silu_mul import silu_mul, silu_mul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 6), (1, 2), (5, 66)])
def test_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    before = x.clone()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    result = silu_mul(x)
    torch.testing.assert_close(
        result.float(), silu_mul_reference(x), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(x, before, atol=0, rtol=0)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="no two halves"):
        silu_mul(torch.zeros(2, 5))
