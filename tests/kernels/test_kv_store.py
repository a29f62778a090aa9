"""kv_store writes the named slots and leaves all others alone."""

import pytest
import torch

from tokenloom.kernels.kv_store import kv_store, kv_store_reference


@pytest.mark.parametrize("slots", [[], [3], [9, 0, 4], list(range(10))])
def test_equals_reference(slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    # As in a model, k and v are strided parts of one tensor.
    qkv = torch.randn(len(slots), 7, 6, generator=generator)
    k, v = qkv[:, 3:5], qkv[:, 5:7]
    k_cache, v_cache = torch.full((10, 2, 6), torch.nan), torch.full((10, 2, 6), torch.nan)
    loc = torch.tensor(slots, dtype=torch.int64)
    expected = kv_store_reference(k, k_cache, loc), kv_store_reference(v, v_cache, loc)
    kv_store(k, v, k_cache, v_cache, loc)
    for cache, wanted in zip((k_cache, v_cache), expected, strict=True):
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0, equal_nan=True)


def test_shapes_are_checked() -> None:
    new, cache = torch.zeros(2, 3, 4), torch.zeros(9, 3, 4)
    loc = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="do not fit"):
        kv_store(new, new, cache, torch.zeros(9, 3, 5), loc)
    with pytest.raises(ValueError, match="do not fit"):
        kv_store(new, new, cache, cache.clone(), loc[:1])
