"""Inputs of a model's forward pass: the StepInputs interface, and ForwardBatch for a CPU.

Built by the runner, read by the models. Devices use DeviceBatch (device_batch.py), whose lengths
stay on the device. Requests and sampling must not enter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F

from ...kernels.decoder_adapter import DecoderAdapter
from ...kernels.paged_attention import paged_attention
from ..worker_batch import ForwardMode
from .lora import HostLoRA, LoRAAdapter, StepLoRA, group_rows

ResidentAdapter = LoRAAdapter | DecoderAdapter  # for float and packed models


class StepInputs(Protocol):
    """A step of T new tokens, as the float models read it on any device."""

    @property
    def positions(self) -> torch.Tensor: ...  # [T]

    @property
    def out_cache_loc(self) -> torch.Tensor: ...  # [T], slot of each new token

    @property
    def logit_indices(self) -> torch.Tensor: ...  # [S], tokens that need logits

    @property
    def k_cache(self) -> list[torch.Tensor]: ...  # per layer [num_slots, KV heads, head_dim]

    @property
    def v_cache(self) -> list[torch.Tensor]: ...

    def embed(self, table: torch.Tensor, lora: StepLoRA) -> torch.Tensor:
        """Embed the new tokens, adapters included: table [vocab, hidden] -> [T, hidden]."""
        ...

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attend from the new tokens q [T, H, D] -> [T, H, D]. Store their KV first."""
        ...

    def lora(self) -> StepLoRA: ...


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """T new tokens of B requests, request by request.

    `k_cache[layer]` and `v_cache[layer]` are [num_slots, num_kv_heads, head_dim]; the first page of
    slots is padding. `request_slots[i]` lists the slots of all `prefix_lens[i] + extend_lens[i]`
    positions of request i in order; the last `extend_lens[i]` belong to its new tokens.
    """

    mode: ForwardMode
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_cache_loc: torch.Tensor  # [T] int64, slot of each new token
    rows: list[int]  # [B], rows of the page table
    page_table: torch.Tensor  # [rows, pages] int32 page numbers
    page_size: int
    extend_lens: list[int]  # [B]
    prefix_lens: list[int]  # [B]
    request_slots: list[torch.Tensor]  # B x [prefix + extend] int64
    logit_indices: torch.Tensor  # [S] int64, tokens that need logits
    k_cache: list[torch.Tensor]
    v_cache: list[torch.Tensor]
    # [B], each made by the model's `resident`; empty without adapters
    adapters: Sequence[ResidentAdapter | None] = ()

    def embed(self, table: torch.Tensor, lora: StepLoRA) -> torch.Tensor:
        x = F.embedding(self.input_ids, table)
        lora.add_embedding(x, self.input_ids)
        return x

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        return paged_attention(q, k_cache, v_cache, self.request_slots, self.extend_lens, scale)

    def lora(self) -> HostLoRA:
        """Return the step's adapters for a float model; must not be called with packed ones."""
        adapters = cast("Sequence[LoRAAdapter | None]", self.adapters)
        return HostLoRA(group_rows(adapters, self.extend_lens))
