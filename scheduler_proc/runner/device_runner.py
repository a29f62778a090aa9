"""DeviceModelRunner: launches the ModelWorkerBatch of a step on a device, reads its tokens later.

Owned by the event loop. Owns the model, the KV buffers, the page table, the graphs and the sampler
of one device. Launching never waits for the device: a step's columns are uploaded in one copy,
decode inputs are the tokens that the last step left on the device, and sampled ids are downloaded
while later steps run. No policy enters.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.lora import DECODE_CHUNK, max_chunks
from ...wire.scheduling_config import SchedulingConfig
from ..models.device_batch import DeviceBatch, DeviceState, Layout, StepColumns
from ..models.llama import LlamaForCausalLM
from ..models.lora import LoRAAdapter
from ..worker_batch import BatchResult, ModelWorkerBatch
from .cuda_graph import CudaGraphRunner, GraphKey
from .device import Device, Read, Wait
from .device_lora import DeviceLoRASlots
from .device_sampler import DeviceSampler
from .facts import RunnerFacts
from .kv_pool import SlotTable
from .lora_pool import LoRAMemoryPool
from .step_columns import StepPlan, decode_layout

HOST_BUFFERS = 3  # two for steps in flight, one to write


@dataclass(slots=True, frozen=True)
class DeviceStep:
    step: int
    how: str  # graph or eager, with the reason, for the log
    _read: Read

    def result(self) -> BatchResult:
        """Wait for the step's sampled ids."""
        return BatchResult(self.step, self._read().tolist())


class DeviceModelRunner:
    def __init__(
        self,
        device: Device,
        model: LlamaForCausalLM,
        buffers: tuple[DeviceState, torch.Tensor],
        graphs: CudaGraphRunner,
        loras: "tuple[LoRAMemoryPool, DeviceLoRASlots]",
        sampler: DeviceSampler,
        facts: RunnerFacts,
    ) -> None:
        """`graphs` is captured over `buffers`, the state and the columns; see device_loading.py."""
        self.facts = facts
        self._device = device
        self._model = model
        self._state, self._columns = buffers
        self._graphs = graphs
        self.loras, self._lora_slots = loras
        self._sampler = sampler
        self._slots = SlotTable(facts.max_running_requests, facts.context_length, facts.page_size)
        size = self._columns.numel()
        self._host = deque(_HostBuffer(device.host_buffer(size)) for _ in range(HOST_BUFFERS))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the copies around a step once, so that their kernels are loaded before a request.

        Changes nothing that a request reads: it writes the padding row's page and empty slot 1.
        """
        self._copy_pages({(self._pad_row, 0): 0})
        if self.facts.max_loras:
            self._device.beside(lambda: self._lora_slots.put(1, None))
        self._device.download(self._state.last_tokens[:1])()

    def prepare(self) -> bool:
        return False

    @torch.inference_mode()
    def launch(self, batch: ModelWorkerBatch) -> DeviceStep:
        """Launch one step. An id of -1 in its result means that only this row failed."""
        self._sampler.open(batch.opened)
        self._set_pages(batch.new_pages)
        self._write_adapters(batch.new_loras)
        choice = self._graphs.choose(batch)
        plan = StepPlan(batch, self.facts.max_loras)
        key = choice.key
        layout = plan.layout if key is None else captured_layout(key, self.facts.max_loras)
        self._bring(plan, layout)
        inputs = DeviceBatch.of(self._state, self._columns, layout)
        logits = self._model.forward(inputs) if key is None else self._graphs.replay(key)
        read = self._sample(batch, logits, inputs.columns.sample_rows)
        return DeviceStep(batch.step, choice.reason, read)

    @property
    def caches(self) -> list[torch.Tensor]:
        """Keys and values of all layers, for checks that write to free pages."""
        return [*self._state.k_cache, *self._state.v_cache]

    def _sample(
        self, batch: ModelWorkerBatch, logits: torch.Tensor, sample_rows: torch.Tensor
    ) -> Read:
        rows = [row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples]
        if not rows:
            return lambda: torch.empty(0, dtype=torch.int32)
        ids = self._sampler.sample(logits, sample_rows, self._sampler.needs(rows))
        return self._device.download(ids[: len(rows)])

    def _bring(self, plan: StepPlan, layout: Layout) -> None:
        buffer = self._host[0]
        self._host.rotate(-1)
        buffer.wait()
        plan.fill(StepColumns.of(buffer.numbers, layout), self._slots, pad_row=self._pad_row)
        size = layout.size
        buffer.wait = self._device.upload(self._columns[:size], buffer.numbers[:size])

    @property
    def _pad_row(self) -> int:
        """The page table row after all others; its pages stay 0, the padding page."""
        return self.facts.max_running_requests

    def _set_pages(self, new_pages: list[tuple[int, int, int]]) -> None:
        if not new_pages:
            return
        self._slots.set_pages(new_pages)
        # The last entry for a place must win, and a scatter keeps no order: the dict drops earlier.
        self._copy_pages({(row, index): page for row, index, page in new_pages})

    def _copy_pages(self, pages: dict[tuple[int, int], int]) -> None:
        """Write pages, keyed by (row, index), to the device's page table."""
        numbers = np.array([(*place, page) for place, page in pages.items()], dtype=np.int64)
        table = self._state.page_table
        places = numbers[:, 0] * table.shape[1] + numbers[:, 1]
        staged = self._device.host_buffer(2 * len(places)).view(2, -1)
        staged.numpy()[:] = places, numbers[:, 2]
        there = staged.to(self._device.name, non_blocking=True)
        table.view(-1).index_copy_(0, there[0].long(), there[1])

    def _write_adapters(self, new_loras: list[tuple[int, int]]) -> None:
        if not new_loras:
            return
        self.loras.write(new_loras)
        slots = [slot for slot, _ in new_loras]

        def copy() -> None:
            for slot, adapter in zip(slots, self.loras.of(slots), strict=True):
                assert adapter is None or isinstance(adapter, LoRAAdapter)
                self._lora_slots.put(slot, adapter)

        self._device.beside(copy)


@dataclass(slots=True)
class _HostBuffer:
    numbers: torch.Tensor
    wait: Wait = lambda: None  # blocks until the device has read `numbers`


def captured_layout(key: GraphKey, max_loras: int) -> Layout:
    return decode_layout(key.size, max_loras if key.lora else 0)


def largest_layout(facts: RunnerFacts, scheduling: SchedulingConfig) -> Layout:
    """The layout of the largest possible step. Without chunking, a prompt may exceed the budget."""
    requests = facts.max_running_requests
    budget = scheduling.max_prefill_tokens
    if scheduling.chunked_prefill_size:
        budget = min(budget, scheduling.chunked_prefill_size)
    else:
        budget = max(budget, facts.context_length)
    tokens = budget + requests
    loras = facts.max_loras
    return Layout(
        tokens,
        requests,
        requests,
        0,
        max_chunks(tokens, loras, DECODE_CHUNK) if loras else 0,
        max_chunks(requests, loras, DECODE_CHUNK) if loras else 0,
    )
