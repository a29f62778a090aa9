"""Tokens of a paged cache as tiles of a dot product. Used by the two attention kernels.

Owns the address arithmetic of pages and the rule of which type the products are computed in.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def operand_type(q: torch.dtype, cache: torch.dtype, interpreted: bool) -> tl.dtype:
    """The type in which q . k and p . v are multiplied (sums are float32 always).

    fp8 becomes float16: it holds every value of both formats, and the conversion of two is one
    instruction. The interpreter multiplies 16-bit integers instead of bfloat16: float32 there.
    """
    if interpreted or torch.float32 in (q, cache):
        return tl.float32
    return tl.float16 if cache in _FP8 else _TRITON_TYPES[cache]


@triton.jit
def load_slots(page_table_row, positions, live, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Slots [N] int64 of `positions` [N] of one row; positions that are not live get slot 0."""
    positions = positions.to(tl.uint32)  # division by a power of two becomes a shift
    pages = tl.load(page_table_row + positions // PAGE_SIZE, mask=live, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def load_tile(
    cache,
    slots,
    live,
    STRIDE_SLOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """[N, BLOCK_D] of one KV head (`cache` points at it); zeros where not live and beyond D."""
    dims = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(cache + slots[:, None] * STRIDE_SLOT + dims[None, :], mask=mask, other=0.0)
    return tile.to(OPERAND)


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Q_STRIDE, Q_HEAD_STRIDE of a `q` [T, H, D], ...: constants, as they last as long as a model.

    The last dimension must be dense: it is what is loaded at once.
    """
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        token, head, dense = tensor.stride()
        if dense != 1:
            raise ValueError(f"the head dimension of {name} has stride {dense}, not 1")
        found |= {f"{name.upper()}_STRIDE": token, f"{name.upper()}_HEAD_STRIDE": head}
    return found
