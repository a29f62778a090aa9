"""Store new keys and values in one layer's cache. Called by rotary_kv_store.py.

On a CUDA device rotary_kv_store.py stores with its own kernel instead.
"""

import torch


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Set cache[out_cache_loc[t]] = new[t]. k, v [T, KH, D] (any strides); caches [S, KH, D].

    out_cache_loc [T] int64: distinct slots, except that padding may repeat. Other slots do not
    change. A float8_e4m3fn or float8_e5m2 cache holds new / scale, saturated; other types ignore
    the scales. Raises ValueError on shapes that disagree.
    """
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if new.shape[1:] != cache.shape[1:] or new.shape[:1] != out_cache_loc.shape:
            raise ValueError(
                f"new {tuple(new.shape)}, cache {tuple(cache.shape)} and slots "
                f"{tuple(out_cache_loc.shape)} do not fit"
            )
        if cache.dtype.itemsize > 1:
            cache.index_copy_(0, out_cache_loc, new)
        else:
            bits = as_stored(new, cache.dtype, scale).view(torch.uint8)
            cache.view(torch.uint8).index_copy_(0, out_cache_loc, bits)


def as_stored(new: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return new / scale in an 8-bit float type, clamped to its largest magnitude."""
    largest = torch.finfo(dtype).max
    return (new.float() / scale).clamp(-largest, largest).to(dtype)


def kv_store_reference(
    new: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor
) -> torch.Tensor:
    """Return a copy of `cache` [S, KH, D] after storing new [T, KH, D]."""
    after = cache.clone()
    for row, slot in zip(new, out_cache_loc.tolist(), strict=True):
        after[slot] = row
    return after
