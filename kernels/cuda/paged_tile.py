"""Load tokens of a paged cache as tiles of a dot product. Used by the two attention kernels.

Owns the address arithmetic of pages and the choice of the type of the products.
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
    """The operand type of q . k and p . v (sums are always float32).

    fp8 becomes float16, which holds every value of both formats and is converted to in pairs by one
    instruction. The interpreter gets float32, because it multiplies bfloat16 as 16-bit integers.
    """
    if interpreted or torch.float32 in (q, cache):
        return tl.float32
    return tl.float16 if cache in _FP8 else _TRITON_TYPES[cache]


@triton.jit
def load_slots(page_table_row, positions, live, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Slots [N] int64 of `positions` [N] of one row; in page 0, padding, where not `live`."""
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
    """Load a tile [N, BLOCK_D] of one KV head, at `cache`; zeros if not live or beyond HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(cache + slots[:, None] * STRIDE_SLOT + dims[None, :], mask=mask, other=0.0)
    return tile.to(OPERAND)


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Kernel constants Q_STRIDE, Q_HEAD_STRIDE of `q` [T, H, D], ...; they are fixed per model.

    Raises ValueError where the last dimension is not dense: it is loaded as a whole.
    """
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        token, head, dense = tensor.stride()
        if dense != 1:
            raise ValueError(f"the head dimension of {name} has stride {dense}, not 1")
        found |= {f"{name.upper()}_STRIDE": token, f"{name.upper()}_HEAD_STRIDE": head}
    return found
