"""Linear: packed for the CPU's matrix library and plain agree, for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from tokenloom.scheduler_proc.models.layers import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 33, 130])
def test_packed_equals_plain(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(389, 251, generator=generator)
    b = torch.randn(389, generator=generator) if bias else None
    x = torch.randn(rows, 300, generator=generator)[:, :251]  # rows that are not contiguous
    linear = Linear(weight, b)
    expected = F.linear(x, weight, b)
    torch.testing.assert_close(linear(x), expected, atol=0, rtol=0)
    linear.pack()
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=1e-4)


def test_packing_lets_go_of_the_plain_weight_and_skips_small_ones() -> None:
    large, small = Linear(torch.zeros(512, 512)), Linear(torch.zeros(8, 8))
    large.pack()
    small.pack()
    assert large.weight is None
    assert small.weight is not None
