"""StepColumns: the integers of a step, laid side by side in one buffer that one copy brings over.

Where a column begins follows from the Layout alone, so a graph captured for a layout finds every
later step of that layout in the same places. Filled by the device runner on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..worker_batch import ModelWorkerBatch
from .kv_pool import SlotTable

NO_ROW = -1  # in token_rows: the id is given; in sample_rows: nobody samples here


class Layout(NamedTuple):
    tokens: int
    requests: int
    samples: int

    @property
    def size(self) -> int:
        return 4 * self.tokens + 5 * self.requests + 1 + 2 * self.samples


@dataclass(slots=True, frozen=True)
class StepColumns:
    """Views [length] int32 of one buffer. T tokens, B requests, S samples.

    A token's id is input_ids[t], or where token_rows[t] names a row, the last token sampled there.
    context_lens = prefix_lens + extend_lens; query_starts[b] is the first token of request b.
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

    @staticmethod
    def of(buffer: torch.Tensor, layout: Layout) -> "StepColumns":
        """Views of buffer [>= layout.size] int32."""
        return StepColumns(*_views(buffer, layout))

    def fill(self, batch: ModelWorkerBatch, slots: SlotTable, pad_row: int) -> None:
        """Write a step, padded to the layout with requests of `pad_row`, whose pages are all 0.

        A step is padded only where each of its requests has one token and samples.
        """
        numbers = StepNumbers(batch)
        to = {field.name: getattr(self, field.name).numpy() for field in fields(self)}
        real = len(numbers.positions)
        token_rows = np.repeat(numbers.rows, numbers.extend_lens)
        to["input_ids"][: batch.num_decodes] = 0
        to["input_ids"][batch.num_decodes : real] = np.array(batch.input_ids, dtype=np.int32)
        to["token_rows"][:real] = np.where(np.arange(real) < batch.num_decodes, token_rows, NO_ROW)
        to["positions"][:real] = numbers.positions
        to["out_cache_loc"][:real] = slots.of_tokens(token_rows, numbers.positions).numpy()
        count = len(numbers.rows)
        for name in ("rows", "prefix_lens", "extend_lens"):
            to[name][:count] = getattr(numbers, name)
        sampling = np.array(batch.samples, dtype=np.bool_)
        samples = int(sampling.sum())
        to["logit_indices"][:samples] = numbers.ends[sampling] - 1
        to["sample_rows"][:samples] = numbers.rows[sampling]
        _pad(to, (real, count, samples), pad_row)
        np.add(to["prefix_lens"], to["extend_lens"], out=to["context_lens"])
        to["query_starts"][0] = 0
        np.cumsum(to["extend_lens"], out=to["query_starts"][1:])


class StepNumbers:
    """The columns of a batch as arrays, int64, and each new token's position."""

    def __init__(self, batch: ModelWorkerBatch) -> None:
        self.rows, self.prefix_lens, self.extend_lens = (
            np.array(column, dtype=np.int64)
            for column in (batch.rows, batch.prefix_lens, batch.extend_lens)
        )
        self.ends: NDArray[np.int64] = self.extend_lens.cumsum()
        starts = self.ends - self.extend_lens
        # prefix + 0, 1, ... request by request
        self.positions: NDArray[np.int64] = np.repeat(
            self.prefix_lens - starts, self.extend_lens
        ) + np.arange(self.ends[-1], dtype=np.int64)


def _views(buffer: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    tokens, requests, samples = layout
    lengths = [tokens] * 4 + [requests] * 4 + [requests + 1] + [samples] * 2
    start = 0
    for length in lengths:
        yield buffer[start : start + length]
        start += length


def _pad(to: dict[str, NDArray[np.int32]], real: tuple[int, int, int], pad_row: int) -> None:
    """One token in page 0 for each padded request: computed, and seen by nobody."""
    tokens, requests, samples = real
    for name in ("input_ids", "positions", "out_cache_loc"):
        to[name][tokens:] = 0
    to["token_rows"][tokens:] = NO_ROW
    to["rows"][requests:] = pad_row
    to["prefix_lens"][requests:] = 0
    to["extend_lens"][requests:] = 1
    to["logit_indices"][samples:] = 0
    to["sample_rows"][samples:] = NO_ROW
