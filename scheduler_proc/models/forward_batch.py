"""All that a model's forward sees of a step: StepInputs, and the ForwardBatch of a CPU.

Built by the runner. A device has another form of the same (device_batch.py): lengths that stay on
the device, so that a captured graph can be replayed with other ones.
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

ResidentAdapter = LoRAAdapter | DecoderAdapter  # ready to compute with: plain, packed


class StepInputs(Protocol):
    """T new tokens: what a float model asks of a step, whatever it runs on."""

    @property
    def positions(self) -> torch.Tensor: ...  # [T]

    @property
    def out_cache_loc(self) -> torch.Tensor: ...  # [T], slot of each new token

    @property
    def logit_indices(self) -> torch.Tensor: ...  # [S] into T: the tokens whose logits are wanted

    @property
    def k_cache(self) -> list[torch.Tensor]: ...  # of each layer [num_slots, KV heads, head_dim]

    @property
    def v_cache(self) -> list[torch.Tensor]: ...

    def embed(self, table: torch.Tensor, lora: StepLoRA) -> torch.Tensor:
        """[T, hidden] of the new tokens, adapters included. table [vocab, hidden]."""
        ...

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """Attention of the new tokens q [T, H, D], whose keys and values are stored by now."""
        ...

    def lora(self) -> StepLoRA: ...


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

    def embed(self, table: torch.Tensor, lora: StepLoRA) -> torch.Tensor:
        x = F.embedding(self.input_ids, table)
        lora.add_embedding(x, self.input_ids)
        return x

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        return paged_attention(q, k_cache, v_cache, self.request_slots, self.extend_lens, scale)

    def lora(self) -> HostLoRA:
        """Of the plain adapters; packed ones compute by themselves."""
        adapters = cast("Sequence[LoRAAdapter | None]", self.adapters)
        return HostLoRA(group_rows(adapters, self.extend_lens))
