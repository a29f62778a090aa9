"""apply_rotary against complex multiplication."""

import pytest
import torch

from tokenloom.kernels.rotary import apply_rotary, apply_rotary_reference


def table(positions: int, head_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions), 0.3 ** torch.arange(head_dim // 2).float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(0, 3, 8), (1, 1, 2), (7, 5, 12)])
def test_equals_reference(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # The heads are part of a wider tensor, whose other part must keep its bits.
    whole = torch.randn(tokens, heads + 2, head_dim, generator=generator).to(dtype)
    before = whole.clone()
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    cos_sin = table(50, head_dim)
    apply_rotary(whole[:, :heads], positions, cos_sin)
    expected = apply_rotary_reference(before[:, :heads], positions, cos_sin)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole[:, :heads].float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(whole[:, heads:], before[:, heads:], atol=0, rtol=0)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        apply_rotary(torch.zeros(2, 3, 8), torch.zeros(2, dtype=torch.int64), table(4, 6))
    with pytest.raises(ValueError, match="do not fit"):
        apply_rotary(torch.zeros(2, 3, 8), torch.zeros(3, dtype=torch.int64), table(4, 8))
