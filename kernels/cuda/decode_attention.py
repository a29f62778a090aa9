"""Attention of one new token per request over the paged cache: flash decoding in two kernels.

The context of a row is cut into splits; the first kernel writes a normalised partial result and its
log-sum-exp for each, the second merges them. Called by kernels/device_attention.py, also inside
captured graphs: the contents of a step may enter only through tensors. A row's splits depend on its
own length, so that its batch-mates change no bit of it; the batch only decides how many programs
share the splits of a row.
"""

import torch
import triton
import triton.language as tl

from .attention_variants import CONTEXT, VARIANTS
from .paged_tile import LOG2_E, load_slots, load_tile, operand_type, strides
from .specialisation import Launch, Specialisation

# Long enough that writing and merging partial results stays at 3 % of what is read (4 heads a
# group), short enough that a row of 8k spreads over all multiprocessors.
SPLIT_TOKENS = 256
# Splits x KV heads of one long row: two programs on each of 132 multiprocessors, in one wave.
PROGRAMS_OF_A_ROW = 256
# Above this many programs in a step, each takes several splits: programs beyond the splits of a
# short row return at once, but are not free.
PROGRAMS_OF_A_STEP = 2112
TILE_BYTES = 16384
MERGE_BLOCK = 16


class DecodeScratch:
    """Buffers for the partial results of the largest batch, shared by all layers; made once, before
    any capture.
    """

    def __init__(
        self, batch: int, heads: int, head_dim: int, max_splits: int, device: torch.device
    ) -> None:
        shape = (batch, heads, max_splits)
        self.partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(shape, dtype=torch.float32, device=device)
        self.max_splits = max_splits


def max_splits(kv_heads: int, max_context: int) -> int:
    """The number of splits of a model's longest row."""
    few = min(max(PROGRAMS_OF_A_ROW // kv_heads, 8), 128)
    return min(few, -(-max_context // SPLIT_TOKENS))


@triton.jit
def _split_tokens(length, MAX_SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens per split, in whole blocks, so that at most MAX_SPLITS cover the row, none empty."""
    needed = tl.cdiv(tl.cdiv(length, MAX_SPLITS), BLOCK) * BLOCK
    return tl.maximum(needed, MIN_TOKENS)


# The step's columns are slices of one buffer, of any alignment: do not specialise on it.
@triton.jit(do_not_specialize_on_alignment=["rows", "context_lens"])
def _attend_splits(
    q,
    k_cache,
    v_cache,
    page_table,
    rows,
    context_lens,
    partial,
    log_sums,
    score_scale,
    table_stride,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
):
    kv_head = tl.program_id(0)  # fastest dimension: heads adjacent in a slot run together
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(context_lens + request)
    split_tokens = _split_tokens(length, MAX_SPLITS, MIN_TOKENS, BLOCK_N)
    splits = tl.cdiv(length, split_tokens)
    first = tl.program_id(1)
    if first >= splits:
        return

    # The query heads of a group are the rows of one tile; the rows beyond them are zeros.
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    q_mask = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = request * Q_STRIDE + heads[:, None] * Q_HEAD_STRIDE + dims[None, :]
    query = tl.load(q + q_offsets, mask=q_mask, other=0.0).to(OPERAND)

    table_row = page_table + tl.load(rows + request).to(tl.int64) * table_stride
    keys = k_cache + kv_head.to(tl.int64) * K_HEAD_STRIDE
    values = v_cache + kv_head.to(tl.int64) * V_HEAD_STRIDE
    for split in range(first, splits, tl.num_programs(1)):
        end = tl.minimum((split + 1) * split_tokens, length)
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        begin = split * split_tokens
        positions = begin + tl.arange(0, BLOCK_N)
        slots = load_slots(table_row, positions, positions < end, PAGE_SIZE)
        for start in range(begin, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            live = positions < end
            key = load_tile(keys, slots, live, K_STRIDE, HEAD_DIM, BLOCK_D, OPERAND)
            value = load_tile(values, slots, live, V_STRIDE, HEAD_DIM, BLOCK_D, OPERAND)
            # The next tile's slots are loaded one tile early: an address that this iteration loads
            # would keep the compiler from fetching the tiles of later iterations ahead of time.
            ahead = positions + BLOCK_N
            slots = load_slots(table_row, ahead, ahead < end, PAGE_SIZE)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            scores = tl.where(live[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
            weights = tl.exp2(scores * score_scale - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(OPERAND), value, acc, input_precision="ieee")
            top = new_top
        out_rows = (request * tl.num_programs(0) * GROUP + heads) * MAX_SPLITS + split
        out_offsets = out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial + out_offsets, acc / total[:, None], mask=q_mask)
        tl.store(log_sums + out_rows, top + tl.log2(total), mask=members < GROUP)


@triton.jit(do_not_specialize_on_alignment=["context_lens"])
def _merge_splits(
    partial,
    log_sums,
    context_lens,
    out,
    v_scale,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(context_lens + request)
    splits = tl.cdiv(length, _split_tokens(length, MAX_SPLITS, MIN_TOKENS, BLOCK_N))
    first_row = (request * tl.num_programs(0) + head) * MAX_SPLITS
    dims = tl.arange(0, BLOCK_D)
    # Finite, for lanes without any split: minus infinity less itself would be NaN.
    nothing = -1e38
    top = tl.full([BLOCK_S], nothing, tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    # Each of the BLOCK_S lanes merges every BLOCK_S-th split, then the lanes are merged.
    for start in range(0, splits, BLOCK_S):
        lanes = start + tl.arange(0, BLOCK_S)
        live = lanes < splits
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (first_row + lanes)[:, None] * HEAD_DIM + dims[None, :]
        logs = tl.load(log_sums + first_row + lanes, mask=live, other=nothing)
        part = tl.load(partial + offsets, mask=mask, other=0.0)
        new_top = tl.maximum(top, logs)
        shrink = tl.exp2(top - new_top)
        weight = tl.where(live, tl.exp2(logs - new_top), 0.0)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    weight = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0) * v_scale
    offsets = request * OUT_STRIDE + head * OUT_HEAD_STRIDE + dims
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


INTERPRETED = not isinstance(_attend_splits, triton.JITFunction)


def block_tokens(head_dim: int, cache_item_bytes: int) -> int:
    """Tokens per tile, for tiles of TILE_BYTES: equal sizes keep as many bytes in flight."""
    padded: int = triton.next_power_of_2(head_dim)
    return min(max(TILE_BYTES // (padded * cache_item_bytes), 16), 128)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    page_size: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """out[b, h] = softmax(scale * q[b, h] . K[:L, h // G]) @ V[:L, h // G], L = context_lens[b].

    q, out [B, H, D]; caches [S, KH, D] of float32, float16, bfloat16 or fp8 (value = stored *
    k_scale or v_scale); page_table [R, P], rows [B] and context_lens [B] int32: the token at
    position p of request b lies in slot page_table[rows[b], p // page_size] * page_size + p %
    page_size. L counts the new token and is 1 or more. All scales are above 0. `scratch` holds B
    or more. Raises ValueError where a last dimension is not dense.
    """
    for launch in _launches(
        q, k_cache, v_cache, page_table, rows, context_lens, out, scratch,
        page_size, scale, k_scale, v_scale,
    ):  # fmt: skip
        launch.run()


def _launches(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    scratch: DecodeScratch,
    page_size: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> list[Launch]:
    batch, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    shape = {
        "HEAD_DIM": head_dim,
        "MAX_SPLITS": scratch.max_splits,
        "MIN_TOKENS": SPLIT_TOKENS,
        "BLOCK_N": block_tokens(head_dim, k_cache.element_size()),
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    operand = operand_type(q.dtype, k_cache.dtype, INTERPRETED)
    programs = max(PROGRAMS_OF_A_STEP // max(batch * kv_heads, 1), 8)
    attend = Launch(
        _attend_splits,
        (kv_heads, min(programs, scratch.max_splits), batch),
        {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "rows": rows,
            "context_lens": context_lens,
            "partial": scratch.partial,
            "log_sums": scratch.log_sums,
            "score_scale": scale * k_scale * LOG2_E,
            "table_stride": page_table.stride(0),
        },
        {
            **strides(q=q, k=k_cache, v=v_cache),
            **shape,
            "GROUP": heads // kv_heads,
            "PAGE_SIZE": page_size,
            "BLOCK_M": max(triton.next_power_of_2(heads // kv_heads), 16),
            "OPERAND": operand,
        },
        num_warps=8 if operand == tl.float32 else 4,  # with 4 the float32 products spill
        num_stages=3,
        pipelined=True,
    )
    merge = Launch(
        _merge_splits,
        (heads, batch),
        {
            "partial": scratch.partial,
            "log_sums": scratch.log_sums,
            "context_lens": context_lens,
            "out": out,
            "v_scale": v_scale,
        },
        {**strides(out=out), **shape, "BLOCK_S": MERGE_BLOCK},
        num_warps=4,
        num_stages=2,
    )
    return [attend, merge]


def specialisations() -> list[Specialisation]:
    found = []
    for model in VARIANTS:
        q, k_cache, v_cache, page_table, numbers, out = model.tensors()
        splits = max_splits(model.kv_heads, CONTEXT)
        scratch = DecodeScratch(1, model.heads, model.head_dim, splits, q.device)
        attend, merge = _launches(
            q, k_cache, v_cache, page_table, numbers, numbers, out, scratch, 16, 0.1, 1.0, 1.0
        )
        found.append(attend.specialisation(f"decode_attention {model.name}"))
        if model.cache == model.dtype:  # the merge does not depend on the cache's type
            found.append(merge.specialisation(f"decode_attention merge {model.name}"))
    return found
