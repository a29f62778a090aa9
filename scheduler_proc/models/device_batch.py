"""DeviceBatch: StepInputs whose lengths and ids are columns of integers on the device.

Built by the device runner over buffers with fixed addresses, so that the forward pass of a decode
step can be captured and replayed. The host must read only sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from ...kernels.cuda.decode_attention import DecodeScratch
from ...kernels.device_attention import DevicePlan, device_attention
from ...kernels.embedding import embed
from ...kernels.lora import (
    DECODE_CHUNK,
    EXTEND_CHUNK,
    LoRALinear,
    LoRASegments,
    lora_expand,
    lora_shrink,
    lora_shrink_ids,
)
from .lora import EMBED, Key, StepLoRA


class Layout(NamedTuple):
    """Sizes of a step; chunks group tokens or samples that use the same adapter."""

    tokens: int
    requests: int
    samples: int
    decodes: int  # the first `decodes` requests have one token each
    token_chunks: int = 0
    sample_chunks: int = 0

    @property
    def size(self) -> int:
        return sum(self.lengths())

    def lengths(self) -> Iterator[int]:
        """Yield the lengths of the fields of StepColumns, in order."""
        yield from (self.tokens,) * 4
        yield from (self.requests,) * 4
        yield self.requests + 1
        yield from (self.samples,) * 2
        for items, chunks in (
            (self.tokens, self.token_chunks),
            (self.samples, self.sample_chunks),
        ):
            yield items if chunks else 0
            yield from (chunks,) * 3


@dataclass(slots=True, frozen=True)
class StepColumns:
    """int32 views of one buffer, so that one copy moves a step to the device.

    The id of token t is last_tokens[token_rows[t]] if token_rows[t] >= 0, else input_ids[t].
    context_lens = prefix_lens + extend_lens; query_starts[b] is the first token of request b. The
    token_* and sample_* columns below are LoRASegments (kernels/lora.py) of tokens and samples.
    """

    input_ids: torch.Tensor  # T
    token_rows: torch.Tensor  # T
    positions: torch.Tensor  # T
    out_cache_loc: torch.Tensor  # T
    rows: torch.Tensor  # B
    prefix_lens: torch.Tensor  # B
    extend_lens: torch.Tensor  # B
    context_lens: torch.Tensor  # B
    query_starts: torch.Tensor  # B + 1
    logit_indices: torch.Tensor  # S
    sample_rows: torch.Tensor  # S
    token_order: torch.Tensor
    token_starts: torch.Tensor
    token_lens: torch.Tensor
    token_slots: torch.Tensor
    sample_order: torch.Tensor
    sample_starts: torch.Tensor
    sample_lens: torch.Tensor
    sample_slots: torch.Tensor

    @staticmethod
    def of(buffer: torch.Tensor, layout: Layout) -> "StepColumns":
        """Split buffer [>= layout.size] int32 into views."""
        views = torch.split(buffer[: layout.size], list(layout.lengths()))
        return StepColumns(*views)

    def names(self) -> Iterator[str]:
        return (field.name for field in fields(self))


@dataclass(slots=True, frozen=True)
class DeviceState:
    """The runner's buffers that all steps share, at fixed addresses."""

    k_cache: list[torch.Tensor]
    v_cache: list[torch.Tensor]
    page_table: torch.Tensor  # [rows, pages] int32
    page_size: int
    last_tokens: torch.Tensor  # [rows] int32
    scratch: DecodeScratch
    adapters: Mapping[Key, LoRALinear]


@dataclass(slots=True, frozen=True)
class DeviceBatch:
    state: DeviceState
    columns: StepColumns
    layout: Layout

    @staticmethod
    def of(state: DeviceState, buffer: torch.Tensor, layout: Layout) -> "DeviceBatch":
        """Build the step whose columns lie in buffer [>= layout.size] int32."""
        return DeviceBatch(state, StepColumns.of(buffer, layout), layout)

    @property
    def positions(self) -> torch.Tensor:
        return self.columns.positions

    @property
    def out_cache_loc(self) -> torch.Tensor:
        return self.columns.out_cache_loc

    @property
    def logit_indices(self) -> torch.Tensor:
        return self.columns.logit_indices

    @property
    def k_cache(self) -> list[torch.Tensor]:
        return self.state.k_cache

    @property
    def v_cache(self) -> list[torch.Tensor]:
        return self.state.v_cache

    def embed(self, table: torch.Tensor, lora: StepLoRA) -> torch.Tensor:
        columns = self.columns
        x, ids = embed(table, columns.input_ids, columns.token_rows, self.state.last_tokens)
        lora.add_embedding(x, ids)
        return x

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        columns, state = self.columns, self.state
        plan = DevicePlan(
            page_table=state.page_table,
            page_size=state.page_size,
            rows=columns.rows,
            prefix_lens=columns.prefix_lens,
            extend_lens=columns.extend_lens,
            context_lens=columns.context_lens,
            query_starts=columns.query_starts,
            num_decodes=self.layout.decodes,
            scratch=state.scratch,
        )
        return device_attention(q, state.k_cache[layer], state.v_cache[layer], plan, scale)

    def lora(self) -> "DeviceLoRA":
        """Return the step's adapters; without token chunks it launches no adapter kernels."""
        c, layout = self.columns, self.layout
        chunk = DECODE_CHUNK if layout.decodes == layout.requests else EXTEND_CHUNK
        return DeviceLoRA(
            self.state.adapters if layout.token_chunks else {},
            LoRASegments(c.token_order, c.token_starts, c.token_lens, c.token_slots, chunk),
            LoRASegments(c.sample_order, c.sample_starts, c.sample_lens, c.sample_slots, chunk),
        )


@dataclass(slots=True, frozen=True)
class DeviceLoRA:
    """StepLoRA on a device: one launch serves all slots, with tokens in chunks of one slot each."""

    linears: Mapping[Key, LoRALinear]  # keyed by the first of the fused parts, such as q
    segments: LoRASegments
    of_samples: LoRASegments

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int, parts: Mapping[str, int]) -> None:
        linear = self.linears.get((layer, next(iter(parts))))
        if linear is not None:
            lora_expand(lora_shrink(x, linear, self.segments), linear, self.segments, y)

    def add_embedding(self, y: torch.Tensor, input_ids: torch.Tensor) -> None:
        linear = self.linears.get(EMBED)
        if linear is not None:
            lora_expand(lora_shrink_ids(input_ids, linear, self.segments), linear, self.segments, y)

    def sampled(self, wanted: torch.Tensor) -> "DeviceLoRA":
        """Return the adapters over sampled tokens; `wanted` must be the step's logit_indices."""
        return DeviceLoRA(self.linears, self.of_samples, self.of_samples)
