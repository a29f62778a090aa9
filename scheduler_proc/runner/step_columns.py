"""Turn the scheduler's batch into the columns that a device reads.

Called by the device runner once per step, on the host. Pure arithmetic over numpy arrays.
"""

import numpy as np
from numpy.typing import NDArray

from ...kernels.lora import DECODE_CHUNK, EXTEND_CHUNK, SegmentPlan, max_chunks, plan_segments
from ..models.device_batch import Layout, StepColumns
from ..worker_batch import ForwardMode, ModelWorkerBatch
from .kv_pool import SlotTable
from .step_numbers import StepNumbers

NO_ROW = -1  # in token_rows: take the id from input_ids; in sample_rows: padding
Columns = dict[str, NDArray[np.int32]]


class StepPlan:
    """A batch to be written in a layout: its own, or a captured one into which it is padded."""

    def __init__(self, batch: ModelWorkerBatch, max_loras: int) -> None:
        self._batch = batch
        self._numbers = numbers = StepNumbers(batch)
        self._of_tokens = self._of_samples = None
        self._max_loras = max_loras
        if batch.lora_slots:
            chunk = DECODE_CHUNK if batch.mode is ForwardMode.DECODE else EXTEND_CHUNK
            slots = np.array(batch.lora_slots, dtype=np.int64)
            self._of_tokens = plan_segments(np.repeat(slots, numbers.extend_lens), chunk)
            self._of_samples = plan_segments(slots[numbers.sampling], chunk)

    @property
    def layout(self) -> Layout:
        """The layout of exactly this step's size."""
        numbers, batch = self._numbers, self._batch
        return Layout(
            len(numbers.positions),
            len(numbers.rows),
            int(numbers.sampling.sum()),
            batch.num_decodes,
            len(self._of_tokens.slots) if self._of_tokens else 0,
            # one empty chunk if no sampling row has an adapter
            max(len(self._of_samples.slots), 1) if self._of_samples else 0,
        )

    def fill(self, columns: StepColumns, slots: SlotTable, pad_row: int) -> None:
        """Write all columns, on the host. Padding requests have one token, in `pad_row`."""
        to: Columns = {name: getattr(columns, name).numpy() for name in columns.names()}
        numbers, batch = self._numbers, self._batch
        tokens, samples = len(numbers.positions), int(numbers.sampling.sum())
        decodes = batch.num_decodes
        _put(to["input_ids"][decodes:], np.array(batch.input_ids, dtype=np.int32), 0)
        to["input_ids"][:decodes] = 0
        _put(to["token_rows"], numbers.token_rows[:decodes], NO_ROW)
        _put(to["positions"], numbers.positions, 0)
        slot_of = slots.of_tokens(numbers.token_rows, numbers.positions).numpy()
        _put(to["out_cache_loc"], slot_of, 0)
        _put(to["rows"], numbers.rows, pad_row)
        _put(to["prefix_lens"], numbers.prefix_lens, 0)
        _put(to["extend_lens"], numbers.extend_lens, 1)
        np.add(to["prefix_lens"], to["extend_lens"], out=to["context_lens"])
        to["query_starts"][0] = 0
        np.cumsum(to["extend_lens"], out=to["query_starts"][1:])
        # A padding sample takes the logits of its own padding token, so that rows stay in place.
        _put(to["logit_indices"], numbers.ends[numbers.sampling] - 1, 0)
        to["logit_indices"][samples:] = np.arange(
            tokens, tokens + len(to["logit_indices"]) - samples
        )
        _put(to["sample_rows"], numbers.rows[numbers.sampling], NO_ROW)
        _put_chunks(to, "token", self._of_tokens)
        _put_chunks(to, "sample", self._of_samples)


def decode_layout(requests: int, max_loras: int) -> Layout:
    """The layout of a captured decode step; `max_loras` 0: without adapters."""
    chunks = max_chunks(requests, max_loras, DECODE_CHUNK) if max_loras else 0
    return Layout(requests, requests, requests, requests, chunks, chunks)


def _put(to: NDArray[np.int32], values: NDArray[np.generic], rest: int) -> None:
    to[: len(values)] = values
    to[len(values) :] = rest


def _put_chunks(to: Columns, prefix: str, plan: SegmentPlan | None) -> None:
    if plan is None:
        for part in ("order", "starts", "lens", "slots"):
            to[f"{prefix}_{part}"][:] = 0
        return
    _put(to[f"{prefix}_order"], plan.order, 0)
    for part in ("starts", "lens", "slots"):
        _put(to[f"{prefix}_{part}"], getattr(plan, part), 0)
