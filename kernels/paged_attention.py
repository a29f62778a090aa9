"""Attention over a paged cache in torch, decodes and extends mixed. Called by ForwardBatch.

Each request is computed separately, so its answer cannot depend on its batch-mates.
"""

import torch
import torch.nn.functional as F

# Bounds the mask of a long extend: rows x context instead of extend x context.
QUERY_BLOCK = 512


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    request_slots: list[torch.Tensor],
    extend_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Compute out[t, h] = softmax(scale * q[t, h] . K[:p + 1, h // G]) @ V[:p + 1, h // G].

    q [T, H, D] holds the new tokens request by request. K and V [L, KH, D] are the cache rows at
    `request_slots[i]` [L] int64; p = L - extend_lens[i] + j is the position of the j-th new token
    of request i (causal). G = H / KH query heads share a KV head. Caches [S, KH, D]. Returns
    [T, H, D]. Raises ValueError on shapes that disagree.
    """
    _check(q, k_cache, v_cache, request_slots, extend_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for slots, length in zip(request_slots, extend_lens, strict=True):
        k = k_cache.index_select(0, slots).transpose(0, 1)  # [KH, L, D]
        v = v_cache.index_select(0, slots).transpose(0, 1)
        attend = _decode if length == 1 else _extend
        attend(q[start : start + length], k, v, out[start : start + length], scale)
        start += length
    return out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    request_slots: list[torch.Tensor],
    extend_lens: list[int],
) -> None:
    if k_cache.shape != v_cache.shape or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and cache {tuple(k_cache.shape)} do not fit")
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads: no multiple of {k_cache.shape[1]} KV heads")
    if len(request_slots) != len(extend_lens) or sum(extend_lens) != q.shape[0]:
        raise ValueError(f"lengths {extend_lens} do not cover {q.shape[0]} tokens")
    for slots, length in zip(request_slots, extend_lens, strict=True):
        if not 0 < length <= slots.shape[0]:
            raise ValueError(f"{length} new tokens among {slots.shape[0]} positions")


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> None:
    """Attend for one token, with the query heads of a group as rows, so K is read once."""
    heads, head_dim = q.shape[1:]
    rows = q.reshape(1, k.shape[0], heads // k.shape[0], head_dim)
    result = F.scaled_dot_product_attention(rows, k[None], v[None], scale=scale)
    out.copy_(result.view(1, heads, head_dim))


def _extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
) -> None:
    """Attend in blocks of queries [KH, G, rows, D]; K and V are broadcast over G uncopied."""
    length, heads, head_dim = q.shape
    kv_heads, context, _ = k.shape
    groups = heads // kv_heads
    for start in range(0, length, QUERY_BLOCK):
        rows = min(QUERY_BLOCK, length - start)
        seen = context - length + start + rows
        block = q[start : start + rows].reshape(rows, kv_heads, groups, head_dim)
        mask = torch.ones(rows, seen, dtype=torch.bool, device=q.device).tril_(seen - rows)
        result = F.scaled_dot_product_attention(
            block.permute(1, 2, 0, 3),
            k[:, None, :seen].expand(-1, groups, -1, -1),
            v[:, None, :seen].expand(-1, groups, -1, -1),
            attn_mask=mask,
            scale=scale,
        )
        out[start : start + rows].copy_(result.permute(2, 0, 1, 3).reshape(rows, heads, head_dim))


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    request_slots: list[torch.Tensor],
    extend_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Compute paged_attention token by token and head by head, in float32."""
    out = torch.empty_like(q, dtype=torch.float32)
    groups = q.shape[1] // k_cache.shape[1]
    token = 0
    for slots, length in zip(request_slots, extend_lens, strict=True):
        for visible in range(slots.shape[0] - length + 1, slots.shape[0] + 1):
            for head in range(q.shape[1]):
                k = k_cache[slots[:visible], head // groups].float()
                v = v_cache[slots[:visible], head // groups].float()
                out[token, head] = torch.softmax(k @ q[token, head].float() * scale, dim=0) @ v
            token += 1
    return out
