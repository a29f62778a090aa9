"""The Triton kernel of silu_mul, interpreted, against its reference."""

import pytest
import torch

from tokenloom.kernels.cuda.silu_mul import silu_mul
from tokenloom.kernels.silu_mul import silu_mul_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 7), (1, 60), (3, 1111)])
def test_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, size = shape
    generator = torch.Generator().manual_seed(0)
    # Rows of a wider tensor.
    gate_up = torch.randn(tokens, 2 * size + 5, generator=generator).to(dtype)[:, : 2 * size]
    out = torch.full((tokens, size), torch.nan, dtype=dtype)
    silu_mul(gate_up, out)
    tolerance = TOLERANCE[dtype]
    expected = silu_mul_reference(gate_up)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
