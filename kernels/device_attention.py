"""Attention over the paged cache of a device: one kernel for decodes, another for extends.

Called by models/device_batch.py. Needs triton, so CPU code must not import it. Must not read values
back from the device.
"""

from dataclasses import dataclass

import torch

from .cuda.decode_attention import DecodeScratch, decode_attention
from .cuda.extend_attention import extend_attention


@dataclass(slots=True, frozen=True)
class DevicePlan:
    """Cache slots of the tokens of B requests, as int32 tensors on the device.

    The slot of position p of request b is page_table[rows[b], p // page_size] * page_size + p %
    page_size. Its new tokens start at token query_starts[b] of the step. The first `num_decodes`
    requests have one new token each.
    """

    page_table: torch.Tensor  # [R, P]
    page_size: int
    rows: torch.Tensor  # [B]
    prefix_lens: torch.Tensor  # [B]
    extend_lens: torch.Tensor  # [B]
    context_lens: torch.Tensor  # [B], prefix + extend
    query_starts: torch.Tensor  # [B + 1]
    num_decodes: int
    scratch: DecodeScratch


def device_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: DevicePlan,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Compute paged_attention.py's formula; returns [T, H, D].

    q [T, H, D] has dense heads; caches are [S, KH, D]. Raises ValueError on shapes that disagree.
    """
    if k_cache.shape != v_cache.shape or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and cache {tuple(k_cache.shape)} do not fit")
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads: no multiple of {k_cache.shape[1]} KV heads")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes = plan.num_decodes
    if decodes:
        decode_attention(
            q[:decodes],
            k_cache,
            v_cache,
            plan.page_table,
            plan.rows[:decodes],
            plan.context_lens[:decodes],
            out[:decodes],
            plan.scratch,
            page_size=plan.page_size,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    if decodes < plan.rows.shape[0]:
        extend_attention(
            q,
            k_cache,
            v_cache,
            plan.page_table,
            plan.rows[decodes:],
            plan.prefix_lens[decodes:],
            plan.extend_lens[decodes:],
            plan.query_starts[decodes:],
            out,
            page_size=plan.page_size,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return out
