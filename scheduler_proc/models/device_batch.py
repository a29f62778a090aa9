"""DeviceBatch: the StepInputs of a device, whose lengths and ids live there as columns of integers.

Built by the device runner over buffers that stay where they are, so that the forward pass of a
decode step can be captured and replayed. Only sizes are known to the host.
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
    """How many of each there are in a step; `chunks` of tokens and of samples with one adapter."""

    tokens: int
    requests: int
    samples: int
    decodes: int  # the first so many requests have one token each
    token_chunks: int = 0
    sample_chunks: int = 0

    @property
    def size(self) -> int:
        return sum(self.lengths())

    def lengths(self) -> Iterator[int]:
        """Of the fields of StepColumns."""
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
    """Views int32 of one buffer, which one copy brings over. Where they begin the layout says.

    A token's id is input_ids[t], or where token_rows[t] names a row, the last token sampled there.
    context_lens = prefix_lens + extend_lens; query_starts[b] is the first token of request b. The
    columns of adapters are those of kernels/lora.py, of tokens and of samples.
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
        """Views of buffer [>= layout.size] int32."""
        views = torch.split(buffer[: layout.size], list(layout.lengths()))
        return StepColumns(*views)

    def names(self) -> Iterator[str]:
        return (field.name for field in fields(self))


@dataclass(slots=True, frozen=True)
class DeviceState:
    """What all steps share: buffers of the runner that keep their place."""

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
        """The step whose columns lie in buffer [>= layout.size] int32."""
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
        """Of a step without adapters: nothing is launched for them."""
        c, layout = self.columns, self.layout
        chunk = DECODE_CHUNK if layout.decodes == layout.requests else EXTEND_CHUNK
        return DeviceLoRA(
            self.state.adapters if layout.token_chunks else {},
            LoRASegments(c.token_order, c.token_starts, c.token_lens, c.token_slots, chunk),
            LoRASegments(c.sample_order, c.sample_starts, c.sample_lens, c.sample_slots, chunk),
        )


@dataclass(slots=True, frozen=True)
class DeviceLoRA:
    """Adapters of all slots at once; tokens in chunks of one slot each."""

    linears: Mapping[Key, LoRALinear]  # by the first of the parts that lie side by side
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
        """`wanted` is the step's own: the host has planned for it."""
        return DeviceLoRA(self.linears, self.of_samples, self.of_samples)
