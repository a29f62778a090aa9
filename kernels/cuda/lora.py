"""Shrink and expand of low-rank adapters on a CUDA device. Launched by kernels/lora.py.

Matrices are multiplied in tiles of 16 or 32 tokens, for which sm_80 and sm_90 use the same
instruction. The input dimension is summed in ranges whose length depends on it alone: a decode
spreads the ranges over programs, an extend loops over them in one, and the sums are the same. Sizes
that vary within a model are plain arguments, so that one compiled kernel serves all its maps.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from .specialisation import Specialisation

_DECODE_BLOCK_K = 128
_EXTEND_BLOCK_K = 64
_BLOCK_N = 64
_MIN_RANGE = 512
_MAX_RANGES = 16
_MIN_DOT = 16  # smallest dimension of a product on tensor cores
_SPREAD_BELOW = 32  # tokens; shorter chunks belong to decodes
_LOADS = 4
_NUM_WARPS = 4
# Not specialised, so that no value of these compiles a kernel anew.
_NOT_SPECIALISED = ("tokens", "parts", "splits")
# The step's columns are slices of one buffer, of any alignment: do not specialise on it.
_COLUMNS = ("order", "starts", "lens", "slots")


class Segments(Protocol):
    """The fields of LoRASegments in kernels/lora.py."""

    @property
    def order(self) -> torch.Tensor: ...
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def lens(self) -> torch.Tensor: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def chunk_tokens(self) -> int: ...


@triton.jit(do_not_specialize=_NOT_SPECIALISED, do_not_specialize_on_alignment=_COLUMNS)
def _shrink_kernel(
    x,
    a,
    h,
    ranks,
    order,
    starts,
    lens,
    slots,
    tokens,
    size,  # of the input
    x_stride,
    r_max,
    parts,
    range_size,
    RANGES: tl.constexpr,  # per program
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    chunk = tl.program_id(0)
    length = tl.load(lens + chunk)
    slot = tl.load(slots + chunk).to(tl.int64)
    rank = tl.load(ranks + slot)
    blocks = tl.cdiv(r_max, BLOCK_R)
    part = tl.program_id(1) // blocks
    first_rank = (tl.program_id(1) % blocks) * BLOCK_R
    if (length == 0) | (slot == 0) | (first_rank >= rank):
        return
    t = tl.arange(0, BLOCK_T)
    token = tl.load(order + tl.load(starts + chunk) + t, mask=t < length, other=0).to(tl.int64)
    r = first_rank + tl.arange(0, BLOCK_R)
    x_rows = x + token[:, None] * x_stride
    a_rows = a + slot * parts * r_max * size + (part * r_max + r).to(tl.int64)[None, :] * size
    in_chunk = (t < length)[:, None]
    in_rank = (r < rank)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for index in range(RANGES):
        begin = (tl.program_id(2) * RANGES + index) * range_size
        partial = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for first in range(begin, tl.minimum(begin + range_size, size), BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            left = tl.load(x_rows + k[None, :], mask=in_chunk & (k < size)[None, :], other=0.0)
            right = tl.load(a_rows + k[:, None], mask=in_rank & (k < size)[:, None], other=0.0)
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            partial = tl.dot(left, right, partial, input_precision="ieee")
        total += partial
    h_rows = h + (tl.program_id(2) * tokens + token)[:, None] * (parts * r_max)
    tl.store(h_rows + (part * r_max + r)[None, :], total, mask=in_chunk & in_rank)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _shrink_ids_kernel(
    ids,
    a,
    h,
    ranks,
    order,
    starts,
    lens,
    slots,
    vocab_size,
    r_max,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    chunk = tl.program_id(0)
    length = tl.load(lens + chunk)
    slot = tl.load(slots + chunk).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    t = tl.arange(0, BLOCK_T)
    token = tl.load(order + tl.load(starts + chunk) + t, mask=t < length, other=0).to(tl.int64)
    token_id = tl.load(ids + token, mask=t < length, other=0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    inside = (t < length)[:, None] & (r < tl.load(ranks + slot))[None, :]
    a_rows = a + slot * r_max * vocab_size + r.to(tl.int64)[None, :] * vocab_size
    values = tl.load(a_rows + token_id[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(h + token[:, None] * r_max + r[None, :], values, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALISED, do_not_specialize_on_alignment=_COLUMNS)
def _expand_kernel(
    h,
    b,
    y,
    ranks,
    order,
    starts,
    lens,
    slots,
    tokens,
    y_stride,
    r_max,
    parts,
    size_0,  # outputs of each part; 0 for a missing part
    size_1,
    size_2,
    splits,
    LOADS: tl.constexpr,  # splits that are loaded at once
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,
):
    chunk = tl.program_id(0)
    length = tl.load(lens + chunk)
    slot = tl.load(slots + chunk).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    rank = tl.load(ranks + slot)
    # A block of outputs lies within one part.
    first_of_1 = tl.cdiv(size_0, BLOCK_N)
    first_of_2 = first_of_1 + tl.cdiv(size_1, BLOCK_N)
    block = tl.program_id(1)
    part = (block >= first_of_1).to(tl.int32) + (block >= first_of_2).to(tl.int32)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    part_start = tl.where(part == 0, 0, tl.where(part == 1, size_0, size_0 + size_1))
    block -= tl.where(part == 0, 0, tl.where(part == 1, first_of_1, first_of_2))
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column = part_start + n

    t = tl.arange(0, BLOCK_T)
    token = tl.load(order + tl.load(starts + chunk) + t, mask=t < length, other=0).to(tl.int64)
    in_chunk = (t < length)[:, None]
    in_part = (n < size)[None, :]
    width = parts * r_max
    b_rows = b + slot * (size_0 + size_1 + size_2) * r_max + column.to(tl.int64)[None, :] * r_max
    more = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    # Load up to a multiple of 16, to get wide loads; ranks beyond `rank` are zeroed afterwards.
    loaded_ranks = tl.cdiv(rank, 16) * 16
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        is_loaded = (r < loaded_ranks) & (r < r_max)
        low = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for first_split in range(0, splits, LOADS):
            for ahead in tl.static_range(LOADS):
                split = first_split + ahead
                place = h + (split * tokens + token)[:, None] * width + (part * r_max + r)[None, :]
                inside = in_chunk & is_loaded[None, :] & (split < splits)
                low += tl.load(place, mask=inside, other=0.0)
        right = tl.load(b_rows + r[:, None], mask=is_loaded[:, None] & in_part, other=0.0)
        if UPCAST:
            right = right.to(tl.float32)
        low = tl.where((r < rank)[None, :], low, 0.0).to(right.dtype)
        right = tl.where((r < rank)[:, None], right, 0.0)
        more = tl.dot(low, right, more, input_precision="ieee")
    place = y + token[:, None] * y_stride + column[None, :]
    base = tl.load(place, mask=in_chunk & in_part, other=0.0).to(tl.float32)
    tl.store(place, (base + more).to(y.dtype.element_ty), mask=in_chunk & in_part)


def _ranges(size: int) -> tuple[int, int]:
    """Length, in whole blocks, and number of the ranges of an input of this size."""
    blocks = triton.cdiv(triton.cdiv(size, _MAX_RANGES), _DECODE_BLOCK_K)
    length = max(_MIN_RANGE, blocks * _DECODE_BLOCK_K)
    return length, triton.cdiv(size, length)


def _block_r(r_max: int, largest: int) -> int:
    """Ranks per product, at most `largest`."""
    wanted: int = triton.next_power_of_2(r_max)
    return min(max(wanted, _MIN_DOT), largest)


def shrink(
    x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, parts: int, segments: Segments
) -> torch.Tensor:
    """Launch lora_shrink of kernels/lora.py; a is contiguous."""
    (tokens, size), r_max = x.shape, a.shape[1] // parts
    range_size, ranges = _ranges(size)
    # Decodes spread over many small programs; extends read x few times.
    is_decode = segments.chunk_tokens < _SPREAD_BELOW
    splits, block_r = (ranges, _MIN_DOT) if is_decode else (1, _block_r(r_max, 64))
    h = torch.empty(splits, tokens, a.shape[1], dtype=torch.float32, device=x.device)
    grid = (len(segments.slots), parts * triton.cdiv(r_max, block_r), splits)
    if len(segments.slots) == 0:
        return h
    _shrink_kernel[grid](
        x,
        a,
        h,
        ranks,
        segments.order,
        segments.starts,
        segments.lens,
        segments.slots,
        tokens,
        size,
        x.stride(0),
        r_max,
        parts,
        range_size,
        RANGES=ranges // splits,
        BLOCK_T=segments.chunk_tokens,
        BLOCK_R=block_r,
        BLOCK_K=_DECODE_BLOCK_K if is_decode else _EXTEND_BLOCK_K,
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=_NUM_WARPS,
        num_stages=4,
    )
    return h


def shrink_ids(
    ids: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Launch lora_shrink_ids of kernels/lora.py; a is contiguous."""
    r_max, vocab_size = a.shape[1:]
    h = torch.empty(1, ids.shape[0], r_max, dtype=torch.float32, device=ids.device)
    if len(segments.slots) == 0:
        return h
    _shrink_ids_kernel[(len(segments.slots),)](
        ids,
        a,
        h,
        ranks,
        segments.order,
        segments.starts,
        segments.lens,
        segments.slots,
        vocab_size,
        r_max,
        BLOCK_T=segments.chunk_tokens,
        BLOCK_R=triton.next_power_of_2(r_max),
        num_warps=_NUM_WARPS,
    )
    return h


def expand(
    h: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    part_sizes: tuple[int, ...],
    segments: Segments,
    y: torch.Tensor,
) -> None:
    """Launch lora_expand of kernels/lora.py; h and b are contiguous."""
    r_max = b.shape[2]
    blocks = sum(triton.cdiv(size, _BLOCK_N) for size in part_sizes)
    if len(segments.slots) == 0:
        return
    _expand_kernel[(len(segments.slots), blocks)](
        h,
        b,
        y,
        ranks,
        segments.order,
        segments.starts,
        segments.lens,
        segments.slots,
        h.shape[1],
        y.stride(0),
        r_max,
        len(part_sizes),
        *part_sizes,
        *(0,) * (3 - len(part_sizes)),
        h.shape[0],
        LOADS=_LOADS,
        BLOCK_T=segments.chunk_tokens,
        BLOCK_N=_BLOCK_N,
        BLOCK_R=_block_r(r_max, 32),
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


_SEGMENTS = dict.fromkeys(("ranks", "order", "starts", "lens", "slots"), "*i32")


def specialisations() -> list[Specialisation]:
    """Variants for ranks up to 16 and up to 64, and for extends with inputs of 4096 and 14336."""
    shrinks = ((16, 16, 1), (32, 16, 8), (32, 64, 8), (32, 64, 16))
    expands = ((16, 16), (16, 32), (32, 16), (32, 32))
    return [
        *(_shrink("bf16", *one) for one in shrinks),
        *(_shrink_ids("bf16", chunk) for chunk in (16, 32)),
        *(_expand("bf16", *one) for one in expands),
        _shrink("fp16", 16, 16, 1),
        _expand("fp16", 16, 32),
    ]


def _shrink(dtype: str, chunk: int, block_r: int, ranges: int) -> Specialisation:
    constants: dict[str, object] = {
        "RANGES": ranges,
        "BLOCK_T": chunk,
        "BLOCK_R": block_r,
        "BLOCK_K": _DECODE_BLOCK_K if chunk < _SPREAD_BELOW else _EXTEND_BLOCK_K,
        "UPCAST": False,
    }
    return Specialisation(
        f"lora_shrink {dtype} chunk {chunk} rank {block_r} ranges {ranges}",
        _shrink_kernel,
        {"x": f"*{dtype}", "a": f"*{dtype}", "h": "*fp32", "tokens": "i32", "parts": "i32"}
        | _SEGMENTS
        | dict.fromkeys(("size", "x_stride", "r_max", "range_size"), "i32:16")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        _NUM_WARPS,
        num_stages=4,
    )


def _shrink_ids(dtype: str, chunk: int) -> Specialisation:
    constants: dict[str, object] = {"BLOCK_T": chunk, "BLOCK_R": 64}
    return Specialisation(
        f"lora_shrink_ids {dtype} chunk {chunk}",
        _shrink_ids_kernel,
        {"ids": "*i64", "a": f"*{dtype}", "h": "*fp32", "vocab_size": "i32:16", "r_max": "i32:16"}
        | _SEGMENTS
        | dict.fromkeys(constants, "constexpr"),
        constants,
        _NUM_WARPS,
        num_stages=1,
    )


def _expand(dtype: str, chunk: int, block_r: int) -> Specialisation:
    constants: dict[str, object] = {
        "LOADS": _LOADS,
        "BLOCK_T": chunk,
        "BLOCK_N": _BLOCK_N,
        "BLOCK_R": block_r,
        "UPCAST": False,
    }
    return Specialisation(
        f"lora_expand {dtype} chunk {chunk} rank {block_r}",
        _expand_kernel,
        {"h": "*fp32", "b": f"*{dtype}", "y": f"*{dtype}"}
        | _SEGMENTS
        | dict.fromkeys(("tokens", "parts", "splits"), "i32")
        | dict.fromkeys(("y_stride", "r_max", "size_0", "size_1", "size_2"), "i32:16")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        _NUM_WARPS,
        num_stages=1,
    )
