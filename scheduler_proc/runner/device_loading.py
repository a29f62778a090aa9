"""Make a DeviceModelRunner from a model on a device: size the KV pool and capture the graphs.

Called once, at start-up. The order matters: activations and graphs are measured with a KV cache of
one page before the pool is sized, so that a long prompt or a capture never runs out of memory.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...kernels.cuda.decode_attention import DecodeScratch, max_splits
from ...wire.config import ExecutionConfig
from ...wire.scheduling_config import SchedulingConfig
from ..models.device_batch import DeviceBatch, DeviceState, Layout, StepColumns
from ..models.llama import LlamaForCausalLM
from .cuda_graph import CudaGraphRunner, GraphKey, ladder
from .device import Device
from .device_lora import DeviceLoRASlots
from .device_runner import DeviceModelRunner, captured_layout, largest_layout
from .device_sampler import DeviceSampler
from .facts import RunnerFacts
from .kv_pool import KVShape
from .lora_pool import AdapterReader, LoRAMemoryPool
from .memory import DEVICE_FRACTION, PoolNeeds, size_kv_pool
from .step_columns import NO_ROW

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class DeviceSource:
    """A loaded model, and the settings of the runner to build around it."""

    model: LlamaForCausalLM
    kv_dtype: torch.dtype
    vocab_size: int  # ids that the tokenizer knows
    dtype_name: str
    read_adapter: AdapterReader
    max_loras: int
    max_lora_rank: int


def make_device_runner(
    device: Device, source: DeviceSource, scheduling: SchedulingConfig, execution: ExecutionConfig
) -> DeviceModelRunner:
    """Raises ModelError when no useful KV pool fits beside weights, graphs and activations."""
    return _Builder(device, source, scheduling, execution).build()


class _Builder:
    def __init__(
        self,
        device: Device,
        source: DeviceSource,
        scheduling: SchedulingConfig,
        execution: ExecutionConfig,
    ) -> None:
        self._device, self._source = device, source
        self._scheduling, self._execution = scheduling, execution
        spec = source.model.spec
        self._kv_shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, source.kv_dtype)
        rows = scheduling.max_running_requests
        self._facts = RunnerFacts(
            vocab_size=source.vocab_size,
            context_length=spec.context_length,
            page_size=scheduling.page_size,
            max_total_tokens=0,
            num_pages=1,
            dtype_name=source.dtype_name,
            max_running_requests=rows,
            max_loras=source.max_loras,
            on_device=True,
        )
        largest = largest_layout(self._facts, scheduling)
        self._largest = largest
        self._columns = torch.zeros(largest.size, dtype=torch.int32, device=device.name)
        self._lora_slots = DeviceLoRASlots(
            spec, source.max_loras, source.max_lora_rank, source.model.dtype, device.name
        )
        self._sampler = DeviceSampler(rows, source.vocab_size, torch.device(device.name))
        sizes = (
            [] if execution.disable_cuda_graph else ladder(min(execution.cuda_graph_max_bs, rows))
        )
        self._graphs = CudaGraphRunner(device, sizes, with_lora=source.max_loras > 0)
        self._logits = torch.empty(
            max(sizes, default=0), spec.vocab_size, dtype=torch.float32, device=device.name
        )
        self._state = self._state_over(1)

    @torch.inference_mode()
    def build(self) -> DeviceModelRunner:
        reserve = self._device.peak_bytes(self._compute_largest) + self._graph_bytes()
        shard = self._source.model.shard
        free = shard.smallest(self._device.free_bytes() - reserve)
        size = size_kv_pool(self._needs(free))
        log.info("%s", size.reason)
        pages = size.tokens // self._scheduling.page_size + 1
        self._state = self._state_over(pages)
        self._graphs.capture(self._pad_columns, self._forward_captured)
        facts = replace(self._facts, max_total_tokens=size.tokens, num_pages=pages)
        loras = LoRAMemoryPool(self._source.max_loras, self._source.read_adapter)
        runner = DeviceModelRunner(
            self._device,
            self._source.model,
            (self._state, self._columns),
            self._graphs,
            (loras, self._lora_slots),
            self._sampler,
            facts,
        )
        self._warm_up()
        runner.warm_up()
        return runner

    def _warm_up(self) -> None:
        """Use every kernel once, so that it is compiled now and not while a request waits."""
        self._sampler.warm_up(self._source.model.spec.vocab_size)
        self._pad_columns(GraphKey(1, lora=False))
        chunks = (0, 1) if self._facts.max_loras else (0,)  # the chunk is empty
        for count in chunks:
            self._forward(Layout(1, 1, 1, 0, count, count))
            self._forward(Layout(1, 1, 1, 1, count, count))

    def _needs(self, free: int) -> PoolNeeds:
        return PoolNeeds(
            bytes_per_token=self._kv_shape.bytes_per_token,
            page_size=self._scheduling.page_size,
            context_length=self._facts.context_length,
            max_running_requests=self._facts.max_running_requests,
            available_bytes=max(free, 0),
            mem_fraction=self._execution.mem_fraction or DEVICE_FRACTION,
            kv_tokens=self._execution.kv_tokens,
            cap_bytes=None,
        )

    def _state_over(self, pages: int) -> DeviceState:
        """Buffers for `pages` pages. The last row of the page table is padding and stays all 0."""
        facts, shape, device = self._facts, self._kv_shape, self._device.name
        size = (pages * facts.page_size, shape.num_kv_heads, shape.head_dim)
        caches = [
            torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2 * shape.num_layers)
        ]
        rows = facts.max_running_requests
        row_pages = -(-facts.context_length // facts.page_size)
        spec = self._source.model.spec
        splits = max_splits(spec.num_kv_heads, facts.context_length)
        scratch = DecodeScratch(rows, spec.num_heads, spec.head_dim, splits, torch.device(device))
        return DeviceState(
            k_cache=caches[::2],
            v_cache=caches[1::2],
            page_table=torch.zeros(rows + 1, row_pages, dtype=torch.int32, device=device),
            page_size=facts.page_size,
            last_tokens=self._sampler.last_tokens,
            scratch=scratch,
            adapters=self._lora_slots.linears,
        )

    def _compute_largest(self) -> None:
        """Compute the largest step, as prompts in the padding row."""
        facts, budget = self._facts, self._largest.tokens - self._largest.requests
        lengths = list(_pieces(budget, facts.context_length, facts.max_running_requests))
        layout = Layout(sum(lengths), len(lengths), len(lengths), 0)
        columns = StepColumns.of(self._columns, layout)
        self._columns.zero_()
        columns.token_rows.fill_(NO_ROW)
        columns.rows.fill_(facts.max_running_requests)
        columns.extend_lens.copy_(torch.tensor(lengths))
        columns.context_lens.copy_(columns.extend_lens)
        torch.cumsum(columns.extend_lens, 0, dtype=torch.int32, out=columns.query_starts[1:])
        columns.logit_indices.copy_(columns.query_starts[1:] - 1)
        self._forward(layout)

    def _graph_bytes(self) -> int:
        """Estimate the bytes of all graphs: capture the two largest, measure, and free them again.

        The first includes the memory that all share; every further one takes about the second's.
        """
        keys = self._graphs.keys()
        before = self._device.free_bytes()
        used = [before]
        captured = []
        stream = self._device.capture_stream()  # its own: these graphs are freed before the others
        for key in keys[:2]:
            self._pad_columns(key)
            captured.append(self._device.capture(partial(self._forward_captured, key), stream))
            used.append(self._device.free_bytes())
        if len(used) < 3:
            return before - used[-1]
        return before - used[1] + (used[1] - used[2]) * (len(keys) - 1)

    def _pad_columns(self, key: GraphKey) -> None:
        """Fill the columns with a step of padding only, to run before and in a capture."""
        self._columns.zero_()
        columns = StepColumns.of(self._columns, captured_layout(key, self._facts.max_loras))
        columns.token_rows.fill_(NO_ROW)
        columns.rows.fill_(self._facts.max_running_requests)
        columns.extend_lens.fill_(1)
        columns.context_lens.fill_(1)
        columns.sample_rows.fill_(NO_ROW)

    def _forward_captured(self, key: GraphKey) -> torch.Tensor:
        """Compute logits into the buffer that all graphs share: one graph is replayed at a time."""
        out = self._logits[: key.size]
        out.copy_(self._forward(captured_layout(key, self._facts.max_loras)))
        return out

    def _forward(self, layout: Layout) -> torch.Tensor:
        return self._source.model.forward(DeviceBatch.of(self._state, self._columns, layout))


def _pieces(total: int, longest: int, most: int) -> Iterator[int]:
    """Yield up to `most` even lengths, none above `longest`, that sum to `total` if possible."""
    for left in range(most, 0, -1):
        length = min(-(-total // left), longest)
        if length <= 0:
            return
        yield length
        total -= length
