"""Causal attention of new tokens over the paged cache, which holds them already.

Called by kernels/device_attention.py for prompt chunks. A program takes a tile of new tokens of one
request, with all query heads of one KV head as its rows, and walks the cache from its first block
to the last token of the tile, holding one block of scores at a time. Tiles are counted from a
request's first new token, so that batch-mates change no bit of a row.
"""

import torch
import triton
import triton.language as tl

from .attention_variants import VARIANTS
from .paged_tile import LOG2_E, load_slots, load_tile, operand_type, strides
from .specialisation import Launch, Specialisation

SEARCH_BLOCK = 128


@triton.jit
def _find_request(query_starts, requests, tile, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr):
    """The request b of a tile, and the index in b of the tile's first token, maybe beyond b's end.

    With n tokens before it, request b's tiles begin at n // BLOCK_Q + b. That leaves b as many
    tiles as it needs, or one more, so that the host can size the grid without knowing any length.
    """
    origin = tl.load(query_starts)
    begun = 0
    for start in range(0, requests, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        known = indices < requests
        before = tl.load(query_starts + indices, mask=known, other=0) - origin
        begun += tl.sum((known & (before // BLOCK_Q + indices <= tile)).to(tl.int32), 0)
    request = begun - 1
    first_tile = (tl.load(query_starts + request) - origin) // BLOCK_Q + request
    return request, (tile - first_tile) * BLOCK_Q


@triton.jit
def _rows_of_tile(query_starts, extend_lens, request, tokens, is_row, is_dim):
    """The step's token of each row of a tile [BLOCK_M, 1], and the mask of those that exist.

    The loads are volatile so that the compiler does not merge two calls of this.
    """
    flat = tl.load(query_starts + request, volatile=True) + tokens
    exists = is_row & (tokens < tl.load(extend_lens + request, volatile=True))
    return flat.to(tl.int64)[:, None], exists[:, None] & is_dim[None, :]


@triton.jit
def _attend_blocks(
    state,
    query,
    keys,
    values,
    table_row,
    first,
    end,
    last_seen,
    score_scale,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One pass of online softmax over the positions from `first` to `end`.

    Without MASKED, every row must attend to all of them, and they must be whole blocks.
    """
    acc, total, top = state
    positions = first + tl.arange(0, BLOCK_N)
    slots = load_slots(table_row, positions, positions < end, PAGE_SIZE)
    for start in range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        live = positions < end if MASKED else tl.full([BLOCK_N], True, tl.int1)
        key = load_tile(keys, slots, live, K_STRIDE, HEAD_DIM, BLOCK_D, OPERAND)
        value = load_tile(values, slots, live, V_STRIDE, HEAD_DIM, BLOCK_D, OPERAND)
        # The next tile's slots are loaded one tile early, as in decode_attention.
        ahead = positions + BLOCK_N
        slots = load_slots(table_row, ahead, ahead < end, PAGE_SIZE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            scores = tl.where(positions[None, :] <= last_seen[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(OPERAND), value, acc, input_precision="ieee")
        top = new_top
    return acc, total, top


# The step's columns are slices of one buffer, of any alignment: do not specialise on it.
@triton.jit(
    do_not_specialize=["requests"],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "extend_lens", "query_starts"],
)
def _attend_tile(
    q,
    k_cache,
    v_cache,
    page_table,
    rows,
    prefix_lens,
    extend_lens,
    query_starts,
    out,
    requests,
    score_scale,
    v_scale,
    table_stride,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OPERAND: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # The last tiles of a prompt take longest: they start first, so that none is left at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request, first_token = _find_request(query_starts, requests, tile, BLOCK_Q, BLOCK_B)
    extend_len = tl.load(extend_lens + request)
    if first_token >= extend_len:
        return

    prefix_len = tl.load(prefix_lens + request)
    members = tl.arange(0, BLOCK_M)
    tokens = first_token + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    dims = tl.arange(0, BLOCK_D)
    flat, mask = _rows_of_tile(
        query_starts, extend_lens, request, tokens, members < BLOCK_Q * GROUP, dims < HEAD_DIM
    )
    q_offsets = flat * Q_STRIDE + heads[:, None] * Q_HEAD_STRIDE + dims[None, :]
    query = tl.load(q + q_offsets, mask=mask, other=0).to(OPERAND)

    table_row = page_table + tl.load(rows + request).to(tl.int64) * table_stride
    keys = k_cache + kv_head.to(tl.int64) * K_HEAD_STRIDE
    values = v_cache + kv_head.to(tl.int64) * V_HEAD_STRIDE
    # Rows beyond the tile attend to what its last row does, so that no row has zero positions.
    context = prefix_len + tl.minimum(first_token + BLOCK_Q, extend_len)
    last_seen = tl.minimum(prefix_len + tokens, context - 1)
    all_see = (prefix_len + first_token + 1) // BLOCK_N * BLOCK_N
    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
    )
    state = _attend_blocks(
        state, query, keys, values, table_row, 0, all_see, last_seen, score_scale,
        K_STRIDE, V_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, OPERAND, False,
    )  # fmt: skip
    acc, total, _ = _attend_blocks(
        state, query, keys, values, table_row, all_see, context, last_seen, score_scale,
        K_STRIDE, V_STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, OPERAND, True,
    )  # fmt: skip
    # Recomputed here: kept through the loops, they would cost 40 registers.
    flat, mask = _rows_of_tile(
        query_starts, extend_lens, request, tokens, members < BLOCK_Q * GROUP, dims < HEAD_DIM
    )
    result = acc / total[:, None] * v_scale
    out_offsets = flat * OUT_STRIDE + heads[:, None] * OUT_HEAD_STRIDE + dims[None, :]
    tl.store(out + out_offsets, result.to(out.dtype.element_ty), mask=mask)


INTERPRETED = not isinstance(_attend_tile, triton.JITFunction)


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """out[t, h] = softmax(scale * q[t, h] . K[:p + 1, h // G]) @ V[:p + 1, h // G].

    q, out [T, H, D] hold the new tokens request by request: those of request b begin at
    query_starts[b] ([B] int32 or more, dense: b's end where b + 1's begin, the first anywhere in T)
    and are extend_lens[b] [B] int32, 1 or more. The j-th has the position p = prefix_lens[b] + j.
    Caches, page_table and rows are those of decode_attention.
    """
    _launch(
        q, k_cache, v_cache, page_table, rows, prefix_lens, extend_lens, query_starts, out,
        page_size, scale, k_scale, v_scale,
    ).run()  # fmt: skip


def _tiles(head_dim: int, operand: tl.dtype, cache_item_bytes: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps and stages that spill on neither sm_80 nor sm_90."""
    if operand == tl.float32:
        return 16, 16, 4, 3
    if head_dim <= 128:
        return 128, 64, 8, 3
    return 64, 16 * cache_item_bytes, 8, 3


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    query_starts: torch.Tensor,
    out: torch.Tensor,
    page_size: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> Launch:
    tokens, heads, head_dim = q.shape
    requests = rows.shape[0]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    operand = operand_type(q.dtype, k_cache.dtype, INTERPRETED)
    block_m, block_n, num_warps, num_stages = _tiles(head_dim, operand, k_cache.element_size())
    return Launch(
        _attend_tile,
        (kv_heads, tokens // (block_m // group) + requests),
        {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "rows": rows,
            "prefix_lens": prefix_lens,
            "extend_lens": extend_lens,
            "query_starts": query_starts,
            "out": out,
            "requests": requests,
            "score_scale": scale * k_scale * LOG2_E,
            "v_scale": v_scale,
            "table_stride": page_table.stride(0),
        },
        {
            **strides(q=q, k=k_cache, v=v_cache, out=out),
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_B": SEARCH_BLOCK,
            "OPERAND": operand,
        },
        num_warps,
        num_stages,
        pipelined=True,
    )


def specialisations() -> list[Specialisation]:
    found = []
    for model in VARIANTS:
        q, k_cache, v_cache, page_table, numbers, out = model.tensors()
        launch = _launch(
            q, k_cache, v_cache, page_table, numbers, numbers, numbers, numbers, out,
            16, 0.1, 1.0, 1.0,
        )  # fmt: skip
        found.append(launch.specialisation(f"extend_attention {model.name}"))
    return found
