"""Lab: what sections share: device, large dummy model, runners over it, measured rates.

Made by check.py. Models and runners are built on first use, and released when another needs the
memory.
"""

import gc
import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from ...model_files.errors import ModelError
from ...scheduler_proc.models.config import ModelSpec, parse_spec
from ...scheduler_proc.models.dummy_weights import fill_dummy
from ...scheduler_proc.models.llama import LlamaForCausalLM
from ...scheduler_proc.models.lora import LoRAAdapter
from ...scheduler_proc.runner.device_loading import DeviceSource, make_device_runner
from ...scheduler_proc.runner.device_runner import DeviceModelRunner
from ...scheduler_proc.runner.memory import DEVICE_FRACTION
from ...scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch, RowOpen
from ...wire.config import ExecutionConfig
from ...wire.sampling import SamplingParams
from ...wire.scheduling_config import SchedulingConfig
from .floors import kv_bytes_per_token
from .results import Skip
from .rig import Rig, TimedDevice
from .sizes import Sizes

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20, ignore_eos=True)
WARM_UP = 3
IN_FLIGHT = 2


@dataclass(slots=True)
class Lab:
    rig: Rig
    sizes: Sizes
    copy_rate: float = math.nan  # bytes read and written a second
    matrix_rate: float = math.nan  # operations a second
    _model: LlamaForCausalLM | None = None
    _bench: "RunnerBench | None" = None
    # parameters by their names in a checkpoint, for a peer that computes with the same memory
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return parse_spec(self.sizes.large)

    def model(self) -> LlamaForCausalLM:
        """The large model with dummy weights. Raises Skip where the device has no room for it."""
        if self._model is None:
            self._model, self.weights = self.dummy_model(self.sizes.large, self.sizes.dtype)
        return self._model

    def dummy_model(
        self, config: dict[str, Any], dtype: torch.dtype
    ) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
        try:
            model = LlamaForCausalLM(parse_spec(config), dtype, self.rig.device.name)
        except torch.cuda.OutOfMemoryError as error:
            raise Skip(f"the model does not fit: {error}") from error
        fill_dummy(model)
        weights = dict(model.weight_slots)
        model.finish()
        return model, weights

    def bench(self) -> "RunnerBench":
        """A runner over the large model, with graphs and with a pool for the cases that fit."""
        if self._bench is None:
            largest = max(rows * context for rows, context in self._cases_that_fit())
            self._bench = self.runner(self.model(), tokens=largest)
            fill_caches(self._bench.runner)
        return self._bench

    def _cases_that_fit(self) -> list[tuple[int, int]]:
        item = self.sizes.dtype.itemsize
        self.model()
        free = self.rig.device.free_bytes() * DEVICE_FRACTION**2  # graphs and activations, too
        room = free / kv_bytes_per_token(self.spec, item)
        fitting = [case for case in self.sizes.decodes if case[0] * case[1] < room]
        return fitting or [min(self.sizes.decodes)]

    def runner(
        self,
        model: LlamaForCausalLM,
        *,
        tokens: int,
        rows: int | None = None,
        graphs: bool = True,
        adapters: "Adapters | None" = None,
        scheduling: SchedulingConfig | None = None,
    ) -> "RunnerBench":
        """Build a runner; raises Skip without enough memory for a pool of `tokens`."""
        sizes, device = self.sizes, TimedDevice(self.rig.device, self.rig.timer)
        rows = rows or sizes.most_rows
        scheduling = scheduling or SchedulingConfig(
            max_running_requests=rows,
            max_prefill_tokens=sizes.most_prompt_tokens,
            chunked_prefill_size=sizes.most_prompt_tokens,
            mixed_chunk_size=0,  # prompts get in at once, so that all rows decode together
            page_size=sizes.page_size,
        )
        source = DeviceSource(
            model=model,
            kv_dtype=model.dtype,
            vocab_size=model.spec.vocab_size,
            dtype_name=str(model.dtype).removeprefix("torch."),
            read_adapter=adapters.read if adapters else no_adapters,
            max_loras=adapters.slots if adapters else 0,
            max_lora_rank=adapters.rank if adapters else 1,
        )
        page = scheduling.page_size
        execution = ExecutionConfig(
            # a page for each row on top: contexts need not end with one
            kv_tokens=-(-tokens // page) * page + rows * page,
            disable_cuda_graph=not graphs,
            cuda_graph_max_bs=rows,
        )
        try:
            runner = make_device_runner(device, source, scheduling, execution)
        except (ModelError, torch.cuda.OutOfMemoryError) as error:
            raise Skip(f"no memory for a pool of {tokens} tokens: {error}") from error
        return RunnerBench(runner, device, scheduling)

    def release_runner(self) -> None:
        self._bench = None
        gc.collect()
        self.rig.device.free_bytes()

    def release(self) -> None:
        """Release models and runners."""
        self._model = None
        self.weights = {}
        self.release_runner()


@dataclass(frozen=True)
class Adapters:
    """`make` gives the adapter of a name; the runner asks for it in its loader thread."""

    slots: int
    rank: int
    made: dict[str, LoRAAdapter]

    def read(self, path: Path) -> LoRAAdapter:
        return self.made[path.name]


def no_adapters(path: Path) -> LoRAAdapter:
    raise AssertionError(f"nobody has asked for the adapter {path}")


@torch.inference_mode()
def fill_caches(runner: DeviceModelRunner) -> None:
    """Fill caches with random numbers: zeros would make the device faster."""
    for cache in runner.caches:
        cache.normal_()


@torch.inference_mode()
def poison(runner: DeviceModelRunner) -> None:
    """Fill caches with NaN, so that a read of unwritten slots shows."""
    for cache in runner.caches:
        cache.fill_(torch.nan)


@dataclass(slots=True)
class RunnerBench:
    """A runner with synthetic steps: rows of equal context, computed repeatedly."""

    runner: DeviceModelRunner
    device: TimedDevice
    scheduling: SchedulingConfig

    def decode_seconds(
        self, rows: int, context: int, steps: int, slots: list[int] | None = None
    ) -> tuple[list[float], float]:
        """Device seconds of each of `steps`, and wall seconds a step where two are in flight."""
        first = self._decode(rows, context, slots, self._opening(rows, context))
        again = self._decode(rows, context, slots, ([], []))
        return self._run([first, *[again] * (WARM_UP + steps)], steps)

    def prefill_seconds(self, requests: int, tokens: int, steps: int) -> tuple[list[float], float]:
        """Return device and wall seconds of prompts, as `decode_seconds` does."""
        opened, pages = self._opening(requests, tokens)
        ids = array("i", Random(0).choices(range(self.runner.facts.vocab_size), k=tokens))

        def batch(opened: list[RowOpen], pages: list[tuple[int, int, int]]) -> ModelWorkerBatch:
            return ModelWorkerBatch(
                step=0,
                mode=ForwardMode.EXTEND,
                num_decodes=0,
                rows=list(range(requests)),
                prefix_lens=[0] * requests,
                extend_lens=[tokens] * requests,
                samples=[True] * requests,
                input_ids=ids * requests,
                new_pages=pages,
                opened=opened,
            )

        return self._run([batch(opened, pages), *[batch([], [])] * (1 + steps)], steps)

    def put_adapters(self, slots: list[tuple[int, int]]) -> None:
        """Load adapters into slots by a decode of one row."""
        batch = self._decode(1, 1, None, self._opening(1, 1))
        batch.new_loras.extend(slots)
        self.runner.launch(batch).result()
        self.device.take_seconds()

    def _run(self, batches: list[ModelWorkerBatch], steps: int) -> tuple[list[float], float]:
        timer, in_flight = self.device.timer, deque([self.runner.launch(batches[0])])
        start = timer.mark()
        for index, batch in enumerate(batches[1:], 1):
            if index == len(batches) - steps:
                start = timer.mark()
            in_flight.append(self.runner.launch(batch))
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().result()
        wall = timer.seconds(start, timer.mark()) / steps
        while in_flight:
            in_flight.popleft().result()
        return self.device.take_seconds()[-steps:], wall

    def _opening(self, rows: int, context: int) -> tuple[list[RowOpen], list[tuple[int, int, int]]]:
        """Rows with pages from all over the pool."""
        each = -(-context // self.scheduling.page_size)
        pages = list(range(1, self.runner.facts.num_pages))
        Random(0).shuffle(pages)
        opened = [RowOpen(row, GREEDY, array("i", [0]), array("i"), ()) for row in range(rows)]
        table = [
            (row, index, pages[row * each + index]) for row in range(rows) for index in range(each)
        ]
        return opened, table

    def _decode(
        self,
        rows: int,
        context: int,
        slots: list[int] | None,
        opening: tuple[list[RowOpen], list[tuple[int, int, int]]],
    ) -> ModelWorkerBatch:
        """Build a decode of each row's last token, which can be repeated."""
        return ModelWorkerBatch(
            step=0,
            mode=ForwardMode.DECODE,
            num_decodes=rows,
            rows=list(range(rows)),
            prefix_lens=[context - 1] * rows,
            extend_lens=[1] * rows,
            samples=[True] * rows,
            input_ids=array("i"),
            new_pages=opening[1],
            opened=opening[0],
            lora_slots=slots or [],
        )
