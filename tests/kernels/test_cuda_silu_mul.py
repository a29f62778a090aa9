"""The Triton kernel of silu_mul, interpreted, against its reference."""

import pytest
import torch
from support.interpreted import as_if_on_device

from tokenloom.kernels.silu_mul import silu_mul, silu_mul_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 7), (1, 60), (3, 1111), (2, 3, 5)])
def test_equals_reference(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    *tokens, size = shape
    generator = torch.Generator().manual_seed(0)
    # Rows of a wider tensor.
    gate_up = torch.randn(*tokens, 2 * size + 5, generator=generator).to(dtype)[..., : 2 * size]
    as_if_on_device(monkeypatch)
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    expected = silu_mul_reference(gate_up)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
