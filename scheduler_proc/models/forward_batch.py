"""ForwardBatch: all that a model's forward sees of a step. Device tensors, built by the runner."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.decoder_adapter import DecoderAdapter
from ..worker_batch import ForwardMode
from .lora import LoRAAdapter

ResidentAdapter = LoRAAdapter | DecoderAdapter  # ready to compute with: plain, packed


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """T new tokens of B requests, request by request.

    `k_cache[layer]` and `v_cache[layer]` are [num_slots, num_kv_heads, head_dim]; the first page of
    slots is padding. `request_slots[i]` lists the slots of all `prefix_lens[i] + extend_lens[i]`
    positions of request i, in order: the last `extend_lens[i]` of them are its new tokens.
    """

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64, slot of each new token
    rows: list[int]  # [B], of the page table
    page_table: torch.Tensor  # [rows, pages] int32 page numbers
    page_size: int
    extend_lens: list[int]  # [B]
    prefix_lens: list[int]  # [B]
    request_slots: list[torch.Tensor]  # B x [prefix + extend] int64
    logit_indices: torch.Tensor  # [S] int64 into T: the tokens whose logits are wanted
    k_cache: list[torch.Tensor]
    v_cache: list[torch.Tensor]
    # of each request, as the model's own `resident` made them; empty: none in the step
    adapters: Sequence[ResidentAdapter | None] = ()
