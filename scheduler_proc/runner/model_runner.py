"""ModelRunner: computes a step on the CPU, from its ModelWorkerBatch to a BatchResult.

Owned by the event loop, which calls `launch` once per step and reads the facts at start-up. Owns
the model, the KV buffers, the slot table and the sampler. No policy enters: core decides the rows,
tokens and pages of a step.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...wire.config import ExecutionConfig
from ...wire.scheduling_config import SchedulingConfig
from ..models.forward_batch import ForwardBatch
from ..models.parallel import WHOLE, Shard
from ..worker_batch import BatchResult, ModelWorkerBatch
from .facts import RunnerFacts
from .host import available_memory
from .kv_pool import KVShape, MHATokenToKVPool, SlotTable
from .lora_pool import AdapterReader, LoRAMemoryPool
from .memory import CPU_FRACTION, DEFAULT_CPU_BYTES, PoolNeeds, size_kv_pool
from .prefault import Prefault
from .sampler import Sampler
from .step_numbers import StepNumbers

logger = logging.getLogger(__name__)


class Model(Protocol):
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, >= vocab_size] float32 of the tokens at `batch.logit_indices`."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A loaded model, with its sizes and its adapter reader."""

    model: Model
    kv_shape: KVShape
    context_length: int
    vocab_size: int  # ids that the tokenizer knows; the logits may be wider
    dtype_name: str  # of the weights, as --dtype spells it
    read_adapter: AdapterReader
    shard: Shard = WHOLE


@dataclass(slots=True, frozen=True)
class Computed:
    """A launched step that is already computed: a CPU computes it in `launch`."""

    _result: BatchResult
    how: str = ""

    def result(self) -> BatchResult:
        return self._result


class ModelRunner:
    """The runner of a CPU: `launch` computes the step before it returns."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduling: SchedulingConfig,
        execution: ExecutionConfig,
        max_loras: int = 0,
    ) -> None:
        """Size and map the KV pool. Raises ModelError when no useful pool fits."""
        shape, shard = loaded.kv_shape, loaded.shard
        size = size_kv_pool(
            PoolNeeds(
                bytes_per_token=shape.bytes_per_token,
                page_size=scheduling.page_size,
                context_length=loaded.context_length,
                max_running_requests=scheduling.max_running_requests,
                # All ranks share one machine: measured when the last one has its weights.
                available_bytes=shard.smallest(available_memory()) // shard.size,
                mem_fraction=execution.mem_fraction or CPU_FRACTION,
                kv_tokens=execution.kv_tokens,
                cap_bytes=DEFAULT_CPU_BYTES // shard.size,
            )
        )
        logger.info(size.reason)
        num_rows = scheduling.max_running_requests
        self._model = loaded.model
        self._pool = MHATokenToKVPool(shape, size.tokens, scheduling.page_size)
        self._prefault = Prefault([*self._pool.k_cache, *self._pool.v_cache], self._pool.num_pages)
        self.facts = RunnerFacts(
            vocab_size=loaded.vocab_size,
            context_length=loaded.context_length,
            page_size=scheduling.page_size,
            max_total_tokens=size.tokens,
            num_pages=self._pool.num_pages,
            dtype_name=loaded.dtype_name,
            max_running_requests=num_rows,
            max_loras=max_loras,
            on_device=False,
        )
        self._slots = SlotTable(num_rows, loaded.context_length, scheduling.page_size)
        self._sampler = Sampler(num_rows, loaded.vocab_size)
        self._last_ids = np.zeros(num_rows, dtype=np.int64)  # last sampled id of each row
        self.loras = LoRAMemoryPool(max_loras, loaded.read_adapter)

    @torch.inference_mode()
    def launch(self, batch: ModelWorkerBatch) -> "Computed":
        """Compute one step. An id of -1 in the result means that only this row failed."""
        for opened in batch.opened:
            self._sampler.open(opened)
        self._slots.set_pages(batch.new_pages)
        self._prefault.reach(max((page for _, _, page in batch.new_pages), default=0))
        self.loras.write(batch.new_loras)
        logits = self._model.forward(self._forward_batch(batch))
        sampling_rows = [
            row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples
        ]
        next_ids = self._sampler.sample(logits, sampling_rows)
        self._last_ids[sampling_rows] = np.maximum(next_ids, 0)
        return Computed(BatchResult(batch.step, next_ids))

    def prepare(self) -> bool:
        return self._prefault.step()

    def _forward_batch(self, batch: ModelWorkerBatch) -> ForwardBatch:
        numbers = StepNumbers(batch)
        rows, positions = numbers.rows, numbers.positions
        last_ids = self._last_ids[rows[: batch.num_decodes]]
        totals = (numbers.prefix_lens + numbers.extend_lens).tolist()
        return ForwardBatch(
            mode=batch.mode,
            input_ids=torch.from_numpy(np.concatenate([last_ids, batch.input_ids])),
            positions=torch.from_numpy(positions),
            out_cache_loc=self._slots.of_tokens(numbers.token_rows, positions),
            rows=batch.rows,
            page_table=self._slots.page_table,
            page_size=self.facts.page_size,
            extend_lens=batch.extend_lens,
            prefix_lens=batch.prefix_lens,
            request_slots=[
                self._slots.of_row(row, total)
                for row, total in zip(batch.rows, totals, strict=True)
            ],
            logit_indices=torch.from_numpy(numbers.ends[numbers.sampling] - 1),
            k_cache=self._pool.k_cache,
            v_cache=self._pool.v_cache,
            adapters=self.loras.of(batch.lora_slots),
        )
