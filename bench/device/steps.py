"""How long steps take: decodes against the bandwidth floor, prompts against the matrix rate, LoRA.

Sections over one runner of the large dummy model; what does not fit is noted with the reason.
"""

import math
from statistics import median

import torch

from ...scheduler_proc.models.config import ModelSpec
from ...scheduler_proc.models.lora import LoRAAdapter, LoRAModule, layer_map_sizes
from ...scheduler_proc.runner.device_lora import staged
from ...scheduler_proc.worker_batch import LoRAOrders
from ...wire.messages import LoRARef
from .floors import decode_bytes, prefill_flops, what_fits
from .lab import Adapters, Lab, RunnerBench
from .results import Report, Skip

DECODE_AIM = 0.85  # of the bandwidth floor
PREFILL_AIM = 0.6  # of the matrix rate
OVERLAP_AIM = 1.02  # wall time of a step over its time on the device
LORA_AIM, LORA_AIMED = 1.1, 8  # over the base, with so many adapters
LOAD_SECONDS = 30.0


def environment(lab: Lab, report: Report) -> None:
    """Measure the rates of the machine to which the aims refer."""
    device, sizes = lab.rig.device, lab.sizes
    report.add("free memory", device.free_bytes() / 1e9, "GB")
    room = device.free_bytes() // 4
    lab.copy_rate = _copy_rate(lab, min(sizes.copy_bytes, room))
    report.add("copy, bytes read and written", lab.copy_rate / 1e12, "TB/s")
    side = sizes.matrix_side
    # Random: zeros would make the device faster.
    left, right = (torch.randn(side, side, device=device.name, dtype=sizes.dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = lab.rig.seconds(lambda: torch.matmul(left, right, out=out))
    lab.matrix_rate = 2.0 * side**3 / seconds
    name = str(sizes.dtype).removeprefix("torch.")
    report.add(f"matrix product {name} {side}", lab.matrix_rate / 1e12, "TFLOP/s")


def _copy_rate(lab: Lab, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=lab.rig.device.name)
    target = torch.empty_like(source)
    return 2 * size / lab.rig.seconds(lambda: target.copy_(source))


def decode(lab: Lab, report: Report) -> None:
    bench = lab.bench()
    sizes, item = lab.sizes, lab.sizes.dtype.itemsize
    pool = bench.runner.facts.max_total_tokens
    fits = what_fits(list(sizes.decodes), pool)
    for rows, context in sizes.decodes:
        name = f"{rows} rows, context {context}"
        if fits[rows, context]:
            report.missing(name, fits[rows, context])
            continue
        if not report.has_time(name):
            continue
        seconds, _ = bench.decode_seconds(rows, context, sizes.steps)
        step = median(seconds)
        floor = decode_bytes(lab.spec, rows, context, item) / lab.copy_rate
        report.add(f"{name}: step", step * 1e3, "ms")
        aim = DECODE_AIM if (rows, context) == sizes.aimed else None
        report.add(f"{name}: share of the floor", floor / step, aim=aim)


def prefill(lab: Lab, report: Report) -> None:
    bench = lab.bench()
    for requests, tokens in lab.sizes.prompts:
        name = f"{requests} x {tokens}"
        if not report.has_time(name):
            continue
        seconds, _ = bench.prefill_seconds(requests, tokens, steps=3)
        rate = prefill_flops(lab.spec, requests, tokens) / median(seconds)
        report.add(f"{name}: rate", rate / 1e12, "TFLOP/s")
        largest = (requests, tokens) == lab.sizes.prompts[0]
        aim = PREFILL_AIM if largest else None
        report.add(f"{name}: share of the matrix rate", rate / lab.matrix_rate, aim=aim)


def lora(lab: Lab, report: Report) -> None:
    """Time decodes whose rows name so many different adapters."""
    rows, context = lab.sizes.aimed
    lab.release_runner()
    base = math.nan
    for slots in sorted({max(LORA_AIMED, count) for count in lab.sizes.adapters}):
        if not report.has_time(f"{slots} adapter slots", 5.0):
            continue
        bench = _with_adapters(lab, slots, report)
        for count in lab.sizes.adapters:
            if max(LORA_AIMED, count) != slots:
                continue
            chosen = [1 + row % count for row in range(rows)] if count else None
            seconds, _ = bench.decode_seconds(rows, context, lab.sizes.steps, chosen)
            step = median(seconds)
            report.add(f"{count} adapters, {slots} slots: step", step * 1e3, "ms")
            if not count:
                base = step
                continue
            aim = LORA_AIM if count == LORA_AIMED else None
            report.add(f"{count} adapters over none", step / base, aim=aim, at_most=True)
        del bench  # before the next one is built
        lab.release_runner()


def _with_adapters(lab: Lab, slots: int, report: Report) -> RunnerBench:
    """Return a runner with an adapter in every slot."""
    rows, context = lab.sizes.aimed
    names = [str(number) for number in range(1, slots + 1)]
    # One set of numbers serves all names: every slot has memory of its own all the same.
    adapter = random_adapter(lab, lab.spec, lab.sizes.dtype, lab.sizes.rank)
    adapters = Adapters(slots, lab.sizes.rank, dict.fromkeys(names, adapter))
    bench = lab.runner(lab.model(), tokens=rows * context, rows=rows, adapters=adapters)
    load(bench, names, report)
    bench.put_adapters([(int(name), int(name)) for name in names])
    return bench


def load(bench: RunnerBench, names: list[str], report: Report) -> None:
    """Have the runner's pool take in adapters of these names; their numbers are their lora_ids."""
    loras = bench.runner.loras
    loras.follow(LoRAOrders([LoRARef(int(name), name, name) for name in names], []))
    missing = set(map(int, names))
    while missing:
        if report.left < 0:
            raise Skip("adapters were not loaded in time")
        for loaded in loras.take_loaded():
            if not loaded.ok:
                raise Skip(f"an adapter was not loaded: {loaded.message}")
            missing.discard(loaded.lora_id)


def random_adapter(
    lab: Lab, spec: ModelSpec, dtype: torch.dtype, rank: int, seed: int = 0
) -> LoRAAdapter:
    """Make an adapter on all linear maps, small enough to keep logits finite."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    modules = {
        (layer, name): LoRAModule(matrix(rank, inputs), matrix(outputs, rank))
        for layer in range(spec.num_layers)
        for name, (inputs, outputs) in layer_map_sizes(spec).items()
    }
    pinned = lab.rig.device.name.startswith("cuda")
    return staged(LoRAAdapter(modules, rank), dtype, pinned=pinned)
