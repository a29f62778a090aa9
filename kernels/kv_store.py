"""Writing new keys and values into their slots of one layer's cache. Called by the models."""

import torch


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> None:
    """cache[out_cache_loc[t]] = new[t]. k, v [T, KH, D] (any strides); caches [S, KH, D].

    out_cache_loc [T] int64: distinct slots, except that padding may repeat. Other slots keep their
    bits. Raises ValueError on shapes that disagree.
    """
    for new, cache in ((k, k_cache), (v, v_cache)):
        if new.shape[1:] != cache.shape[1:] or new.shape[:1] != out_cache_loc.shape:
            raise ValueError(
                f"new {tuple(new.shape)}, cache {tuple(cache.shape)} and slots "
                f"{tuple(out_cache_loc.shape)} do not fit"
            )
    k_cache.index_copy_(0, out_cache_loc, k)
    v_cache.index_copy_(0, out_cache_loc, v)


def kv_store_reference(
    new: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor
) -> torch.Tensor:
    """One of the two caches after the store, as a new tensor."""
    after = cache.clone()
    for row, slot in zip(new, out_cache_loc.tolist(), strict=True):
        after[slot] = row
    return after
