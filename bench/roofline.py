"""How far each phase of a step is from its floor: `python -m tokenloom.bench.roofline`.

The floor of a phase is the larger of its bytes over the measured read bandwidth and its operations
over the measured int8 rate, both with all threads; attention counts the bytes of its keys and
values, and each adapter of a step is read once. Works on the packed modes of the native CPU
library, on any model.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ..kernels.cpu.arena import Arena
from ..kernels.decoder import cache_width
from ..kernels.decoder_adapter import DecoderAdapter
from ..kernels.quantised_linear import PackedWeight, Rows, pack, quantised_linear
from ..model_files.resolve import resolve_model
from ..scheduler_proc.models.forward_batch import ForwardBatch
from ..scheduler_proc.models.loader import load_packed_model
from ..scheduler_proc.models.lora import LoRAAdapter, LoRAModule, layer_map_sizes
from ..scheduler_proc.models.packed import PackedLlama
from ..scheduler_proc.worker_batch import ForwardMode

PAGE = 16
CASES = [(1, 1, 256), (8, 1, 256), (32, 1, 256), (1, 1, 1024), (8, 1, 1024), (32, 1, 1024)]
PREFILL = (1, 512, 0)
Case = tuple[int, int, int]  # requests, new tokens of each, context before them
KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
LINEARS = {"qkv": "qkv", "o": "o", "gate_up": "gate_up", "down": "down"}


@dataclass(slots=True, frozen=True)
class Machine:
    threads: int
    bytes_per_s: float
    ops_per_s: float


@dataclass(slots=True, frozen=True)
class Work:
    """Bytes and operations of a phase in one step."""

    num_bytes: float
    ops: float = 0.0

    def floor(self, machine: Machine) -> float:
        return max(self.num_bytes / machine.bytes_per_s, self.ops / machine.ops_per_s)


def best_of(run: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine(threads: int) -> Machine:
    """Measure read bandwidth over 512 MB, and the int8 rate of a product in the cache."""
    torch.set_num_threads(threads)
    stream = torch.ones(1 << 27)
    bandwidth = stream.nbytes / best_of(stream.sum)
    weight = pack([Rows(torch.randn(1536, 576), 576)], "int8")
    x, repeats = torch.randn(36, 576), 20

    def products() -> None:
        for _ in range(repeats):
            quantised_linear(x, weight)

    rate = repeats * 2 * 1536 * 576 * 36 / best_of(products)
    return Machine(threads, bandwidth, rate * threads)


class Stepper:
    """Repeats the same step over its own cache."""

    def __init__(
        self,
        model: PackedLlama,
        case: Case,
        kv_dtype: torch.dtype,
        adapters: Sequence[DecoderAdapter] = (),
    ) -> None:
        spec, (requests, extend, context) = model.spec, case
        named = adapters[:requests]
        pages = -(-(context + extend) // PAGE)
        width = cache_width(spec.head_dim, kv_dtype)
        size = ((requests * pages + 1) * PAGE, spec.num_kv_heads, width)
        arena = Arena()
        # Write the pages: untouched ones all map to one page of zeros, which stays in the cache.
        caches = [
            arena.take(math.prod(size), kv_dtype).view(size).fill_(1)
            for _ in range(2 * spec.num_layers)
        ]
        self._model = model
        model.reset()
        table = torch.arange(1, requests * pages + 1, dtype=torch.int32).view(requests, pages)
        self._batch = ForwardBatch(
            mode=ForwardMode.DECODE if extend == 1 else ForwardMode.EXTEND,
            input_ids=torch.arange(requests * extend) % 1000 + 5,
            positions=torch.empty(0),
            out_cache_loc=torch.empty(0),
            rows=list(range(requests)),
            page_table=table.contiguous(),
            page_size=PAGE,
            extend_lens=[extend] * requests,
            prefix_lens=[context] * requests,
            request_slots=[],
            logit_indices=torch.arange(1, requests + 1) * extend - 1,
            k_cache=caches[::2],
            v_cache=caches[1::2],
            # Rows of one adapter are adjacent, as in the scheduler's batches.
            adapters=[named[i * len(named) // requests] for i in range(requests) if named],
        )

    def step(self) -> None:
        self._model.forward(self._batch)


def random_adapters(model: PackedLlama, count: int, rank: int) -> list[DecoderAdapter]:
    """Make adapters that change all linear maps of each layer."""

    def adapter() -> LoRAAdapter:
        modules = {
            (layer, name): LoRAModule(torch.randn(rank, inputs), torch.randn(outputs, rank) / 1000)
            for layer in range(model.spec.num_layers)
            for name, (inputs, outputs) in layer_map_sizes(model.spec).items()
        }
        return LoRAAdapter(modules, rank)

    return [model.resident(adapter()) for _ in range(count)]


def work_of(
    model: PackedLlama, case: Case, kv_dtype: torch.dtype, adapters: Sequence[DecoderAdapter]
) -> dict[str, Work]:
    """Return the work by phase and of all adapters; phases left out have a negligible floor."""
    requests, extend, context = case
    spec, tokens = model.spec, requests * extend
    works = {}
    for name in LINEARS:
        weights: list[PackedWeight] = [getattr(layer, name) for layer in model.weights.layers]
        ops = sum(2.0 * weight.n * weight.k * tokens for weight in weights)
        works[name] = Work(sum(weight.nbytes for weight in weights), ops)
    head = model.weights.head
    works["head"] = Work(head.nbytes, 2.0 * head.n * head.k * requests)
    width = cache_width(spec.head_dim, kv_dtype) * kv_dtype.itemsize
    per_token = 2.0 * spec.num_layers * spec.num_kv_heads * width
    works["attend"] = Work(per_token * requests * (context + extend))
    works["adapters"] = Work(sum(adapter.num_bytes for adapter in adapters[:requests]))
    return works


def report(
    model: PackedLlama,
    machine: Machine,
    case: Case,
    kv_dtype: torch.dtype,
    adapters: Sequence[DecoderAdapter],
    steps: int,
) -> object:
    requests, extend, context = case
    stepper = Stepper(model, case, kv_dtype, adapters)
    stepper.step()
    model.profile()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        stepper.step()
        times.append(time.perf_counter() - start)
    seconds = {name: value / steps for name, value in model.profile().items()}
    works = work_of(model, case, kv_dtype, adapters)
    whole, floor = median(times), sum(work.floor(machine) for work in works.values())
    label = f"{requests} x {extend} tokens, context {context}"
    if adapters:
        label += f", {min(requests, len(adapters))} adapters"
    print(f"\n{label}: {whole * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms, {floor / whole:.0%}")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        share = f"{works[name].floor(machine) / value:6.0%}" if name in works else "     -"
        print(f"  {name:9} {value * 1e3:8.3f} ms {value / whole:6.1%} of the step  at {share}")
    return {"case": label, "seconds": whole, "floor": floor, "phases": seconds}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom.bench.roofline",
        description="Each phase of a step against its floor.",
    )
    parser.add_argument("--model", help="as for `tokenloom serve`; default: the embedded model")
    parser.add_argument("--dtype", choices=["int8", "int4"], default="int8")
    parser.add_argument("--kv-cache-dtype", choices=list(KV_DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--adapters", type=int, default=0, help="in a step of so many rows or more (default: none)"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: 8)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each case")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    machine, kv_dtype = measure_machine(options.threads), KV_DTYPES[options.kv_cache_dtype]
    print(
        f"{machine.threads} threads: read {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"int8 {machine.ops_per_s / 1e9:.0f} GOP/s"
    )
    model = load_packed_model(
        resolve_model(options.model, None),
        options.dtype,
        load_format="auto",
        context_length=None,
        threads=options.threads,
    )
    model.pin(list(range(options.threads)))
    adapters = random_adapters(model, options.adapters, options.rank)
    rows = [
        report(model, machine, case, kv_dtype, adapters, options.steps)
        for case in [*CASES, PREFILL]
    ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
