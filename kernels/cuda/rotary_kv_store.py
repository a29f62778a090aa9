"""Rotary embedding and the store of keys and values, in one kernel on a CUDA device.

Launched by kernels/rotary_kv_store.py.
"""

import torch
import triton
import triton.language as tl

from .specialisation import Specialisation

_HEADS = 8  # per program


@triton.jit
def _stored(value, scale, LIMIT: tl.constexpr):
    """The value to store in a cache: for fp8, scaled and clamped to +-LIMIT, its largest number."""
    if LIMIT > 0:
        value = tl.minimum(tl.maximum(value / scale, -LIMIT), LIMIT)
    return value


# The step's columns are slices of one buffer, of any alignment: do not specialise on it.
@triton.jit(do_not_specialize_on_alignment=["positions", "out_cache_loc"])
def _rotary_kv_store_kernel(
    qkv,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    out_cache_loc,
    k_scale,
    v_scale,
    num_heads,
    num_kv_heads,
    token_stride,
    head_stride,
    k_slot_stride,
    v_slot_stride,
    cache_head_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= HALF
    HEADS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads + 2 * num_kv_heads) & (pair < HALF)
    is_value = head >= num_heads + num_kv_heads
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)

    angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0)
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)
    place = qkv + token * token_stride + head * head_stride + pair
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    # Keys are rounded like queries before they are stored, so that CPU and device store the same.
    dtype = qkv.dtype.element_ty
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    tl.store(place, turned_first, mask=inside & (head < num_heads + num_kv_heads))
    tl.store(place + HALF, turned_second, mask=inside & (head < num_heads + num_kv_heads))

    slot = tl.load(out_cache_loc + token).to(tl.int64)
    cached = k_cache.dtype.element_ty
    place = k_cache + slot * k_slot_stride + (head - num_heads) * cache_head_stride + pair
    key_first = _stored(turned_first.to(tl.float32), k_scale, LIMIT).to(cached)
    key_second = _stored(turned_second.to(tl.float32), k_scale, LIMIT).to(cached)
    tl.store(place, key_first, mask=inside & is_key)
    tl.store(place + HALF, key_second, mask=inside & is_key)
    kv_head = head - num_heads - num_kv_heads
    place = v_cache + slot * v_slot_stride + kv_head * cache_head_stride + pair
    tl.store(place, _stored(first, v_scale, LIMIT).to(cached), mask=inside & is_value)
    tl.store(place + HALF, _stored(second, v_scale, LIMIT).to(cached), mask=inside & is_value)


def _tile(head_dim: int) -> tuple[int, int]:
    """BLOCK and warps, such that each thread loads eight elements, 16 bytes."""
    block: int = triton.next_power_of_2(head_dim // 2)
    return block, max(_HEADS * block // (32 * 8), 1)


def rotary_kv_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Launch the kernel of kernels/rotary_kv_store.py; heads are dense, cos_sin is contiguous."""
    tokens, heads, head_dim = qkv.shape
    if tokens == 0:
        return
    block, warps = _tile(head_dim)
    is_fp8 = k_cache.dtype.itemsize == 1
    _rotary_kv_store_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        out_cache_loc,
        k_scale,
        v_scale,
        num_heads,
        num_kv_heads,
        qkv.stride(0),
        qkv.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        k_cache.stride(1),
        HALF=head_dim // 2,
        BLOCK=block,
        HEADS=_HEADS,
        LIMIT=torch.finfo(k_cache.dtype).max if is_fp8 else 0.0,
        num_warps=warps,
    )


def specialisations() -> list[Specialisation]:
    limits = {"bf16": 0.0, "fp16": 0.0, "fp8e4nv": 448.0, "fp8e5": 57344.0}
    variants = [("bf16", "bf16", 64), ("fp16", "fp16", 64), ("bf16", "bf16", 80)]
    variants += [(dtype, cache, 128) for dtype in ("bf16", "fp16") for cache in (dtype, "fp8e4nv")]
    variants += [("bf16", "fp8e5", 128), ("bf16", "bf16", 256)]
    return [
        _specialisation(dtype, cache, head_dim, limits[cache])
        for dtype, cache, head_dim in variants
    ]


def _specialisation(dtype: str, cache: str, head_dim: int, limit: float) -> Specialisation:
    block, warps = _tile(head_dim)
    constants: dict[str, object] = {
        "HALF": head_dim // 2,
        "BLOCK": block,
        "HEADS": _HEADS,
        "LIMIT": limit,
    }
    strides = ("token_stride", "head_stride", "k_slot_stride", "v_slot_stride", "cache_head_stride")
    return Specialisation(
        f"rotary_kv_store {dtype} d{head_dim}" + (f" cache {cache}" if cache != dtype else ""),
        _rotary_kv_store_kernel,
        {"qkv": f"*{dtype}", "positions": "*i64", "cos_sin": "*fp32", "out_cache_loc": "*i64"}
        | dict.fromkeys(("k_cache", "v_cache"), f"*{cache}")
        | dict.fromkeys(("k_scale", "v_scale"), "fp32")
        | dict.fromkeys(("num_heads", "num_kv_heads"), "i32")
        | dict.fromkeys(strides, "i32:16")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        warps,
        num_stages=1,
    )
