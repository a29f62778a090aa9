"""Rotary embedding fused with the store into the KV cache. Called by the models."""

import torch

from . import backend
from .kv_store import kv_store
from .rotary import apply_rotary


def rotary_kv_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate query and key heads in place (apply_rotary), then store keys and values (kv_store).

    qkv [T, H + 2 KH, D]: H = num_heads queries, KH = num_kv_heads keys, then values; dense heads,
    D even. positions [T] and out_cache_loc [T] integers, cos_sin [P, D] float32 contiguous, caches
    [S, KH, D] of qkv's dtype, or 8-bit and scaled (kv_store.py). Positions and slots are not
    range-checked. Raises ValueError on shapes that disagree.
    """
    tokens, heads, head_dim = qkv.shape
    cached = (num_kv_heads, head_dim)
    fits = heads == num_heads + 2 * num_kv_heads and cos_sin.shape[1:] == (head_dim,)
    fits &= k_cache.shape[1:] == cached and v_cache.shape[1:] == cached
    if not fits or positions.shape != (tokens,) or out_cache_loc.shape != (tokens,):
        raise ValueError(
            f"qkv {tuple(qkv.shape)} of {num_heads} and {num_kv_heads} heads, positions "
            f"{tuple(positions.shape)}, cos_sin {tuple(cos_sin.shape)}, caches "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)} and slots "
            f"{tuple(out_cache_loc.shape)} do not fit"
        )
    scales = (k_scale, v_scale)
    if backend.on_triton(qkv):
        from .cuda import rotary_kv_store as kernel

        caches = (k_cache, v_cache, out_cache_loc)
        kernel.rotary_kv_store(qkv, num_heads, num_kv_heads, positions, cos_sin, *caches, *scales)
        return
    first_value = num_heads + num_kv_heads
    apply_rotary(qkv[:, :first_value], positions, cos_sin)
    k, v = qkv[:, num_heads:first_value], qkv[:, first_value:]
    kv_store(k, v, k_cache, v_cache, out_cache_loc, *scales)
