"""ModelRunner: turns the ModelWorkerBatch of a step into a BatchResult.

Owned by the event loop, which calls `launch` once a step and reads the facts at start-up. Owns the
model, the KV buffers, the slot table and the sampler. No policy enters: which rows, tokens and
pages make a step is decided in core.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...wire.config import ExecutionConfig, SchedulingConfig
from ..models.forward_batch import ForwardBatch
from ..worker_batch import BatchResult, ModelWorkerBatch
from .host import available_memory
from .kv_pool import KVShape, MHATokenToKVPool, SlotTable
from .lora_pool import AdapterReader, LoRAMemoryPool
from .memory import CPU_FRACTION, PoolNeeds, size_kv_pool
from .sampler import Sampler

logger = logging.getLogger(__name__)


class Model(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, >= vocab_size] float32 of the tokens at `batch.logit_indices`."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model ready to run, and what the runner must know of it."""

    model: Model
    kv_shape: KVShape
    context_length: int
    vocab_size: int  # ids that the tokenizer knows; the logits may be wider
    dtype_name: str  # of the weights, as --dtype spells it
    read_adapter: AdapterReader


@dataclass(slots=True, frozen=True)
class Computed:
    """A launched step that is done: the CPU computes it in `launch`."""

    _result: BatchResult

    def result(self) -> BatchResult:
        return self._result


class ModelRunner:
    """Facts that core and front need are attributes; `num_pages` includes the padding page 0."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduling: SchedulingConfig,
        execution: ExecutionConfig,
        max_loras: int = 0,
    ) -> None:
        """Sizes and maps the KV pool. Raises ModelError when none that is useful fits."""
        shape = loaded.kv_shape
        size = size_kv_pool(
            PoolNeeds(
                bytes_per_token=shape.bytes_per_token,
                page_size=scheduling.page_size,
                context_length=loaded.context_length,
                max_running_requests=scheduling.max_running_requests,
                available_bytes=available_memory(),
                mem_fraction=execution.mem_fraction or CPU_FRACTION,
                kv_tokens=execution.kv_tokens,
            )
        )
        logger.info(size.reason)
        num_rows = scheduling.max_running_requests
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length
        self.page_size = scheduling.page_size
        self.max_total_tokens = size.tokens
        self.dtype_name = loaded.dtype_name
        self._model = loaded.model
        self._pool = MHATokenToKVPool(shape, size.tokens, scheduling.page_size)
        self.num_pages = self._pool.num_pages
        self._slots = SlotTable(num_rows, loaded.context_length, scheduling.page_size)
        self._sampler = Sampler(num_rows, loaded.vocab_size)
        self._last_ids = np.zeros(num_rows, dtype=np.int64)  # sampled, of each row
        self.loras = LoRAMemoryPool(max_loras, loaded.read_adapter)

    @property
    def on_device(self) -> bool:
        """Steps are computed elsewhere, so that the next one can be planned meanwhile."""
        return self._pool.k_cache[0].is_cuda

    @torch.inference_mode()
    def launch(self, batch: ModelWorkerBatch) -> "Computed":
        """Compute one step. An id of -1 in the result means that this row alone has failed."""
        for opened in batch.opened:
            self._sampler.open(opened)
        self._slots.set_pages(batch.new_pages)
        self.loras.write(batch.new_loras)
        logits = self._model.forward(self._forward_batch(batch))
        sampling_rows = [
            row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples
        ]
        next_ids = self._sampler.sample(logits, sampling_rows)
        self._last_ids[sampling_rows] = np.maximum(next_ids, 0)
        return Computed(BatchResult(batch.step, next_ids))

    def _forward_batch(self, batch: ModelWorkerBatch) -> ForwardBatch:
        rows, prefix_lens, extend_lens = (
            np.array(column, dtype=np.int64)
            for column in (batch.rows, batch.prefix_lens, batch.extend_lens)
        )
        last_ids = self._last_ids[rows[: batch.num_decodes]]
        ends = extend_lens.cumsum()
        positions = _positions(prefix_lens, extend_lens, ends)
        totals = (prefix_lens + extend_lens).tolist()
        return ForwardBatch(
            mode=batch.mode,
            input_ids=torch.from_numpy(np.concatenate([last_ids, batch.input_ids])),
            positions=torch.from_numpy(positions),
            out_cache_loc=self._slots.of_tokens(np.repeat(rows, extend_lens), positions),
            rows=batch.rows,
            page_table=self._slots.page_table,
            page_size=self.page_size,
            extend_lens=batch.extend_lens,
            prefix_lens=batch.prefix_lens,
            request_slots=[
                self._slots.of_row(row, total)
                for row, total in zip(batch.rows, totals, strict=True)
            ],
            logit_indices=torch.from_numpy(ends[np.array(batch.samples, dtype=np.bool_)] - 1),
            k_cache=self._pool.k_cache,
            v_cache=self._pool.v_cache,
            adapters=self.loras.of(batch.lora_slots),
        )


def _positions(
    prefix_lens: NDArray[np.int64], extend_lens: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Position [T] of every new token: prefix + 0, 1, ... request by request."""
    starts = ends - extend_lens
    return np.repeat(prefix_lens - starts, extend_lens) + np.arange(ends[-1], dtype=np.int64)
