"""Kernels are compiled before the first request: whatever steps hold later needs no other variant.

Triton's own launcher decides that from the arguments of a launch; here it stops before it compiles
or launches, in a process that does not interpret kernels. Nothing is computed.
"""

import os
import subprocess
import sys
from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest


@pytest.mark.slow
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled() -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    at_start, later = done.stdout.splitlines()
    assert "_attend_tile" in at_start, "the launcher was watched"
    assert later == "later: {}"


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
ROWS, PAGES, PAGE = 8, 4, 16
STEPS = 60


def main() -> None:
    compiled = watch_launches()
    bench = make_bench()
    print("at start:", dict(compiled))
    compiled.clear()
    random = Random(0)
    opening = openings()
    for _ in range(STEPS):
        bench.runner.launch(random_step(random, *opening))
        opening = ([], [])
    print("later:", dict(compiled))


def watch_launches() -> "Counter[str]":
    """Counts what Triton would compile for an H200, by kernel."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tokenloom.kernels import backend

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    compiled: Counter[str] = Counter()
    run = JITFunction.run

    def only_bind(self: JITFunction, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        return run(self, *args, **{**named, "warmup": True})

    def note(self: JITFunction, key: str, signature: object, device: int, *_: object) -> object:
        compiled[self.__name__] += 1
        return self.device_caches[device][0].setdefault(key, object())

    driver.set_active(Driver())
    JITFunction.run = only_bind
    JITFunction._do_compile = note
    backend.on_triton = lambda x: True
    return compiled


def make_bench() -> Any:  # noqa: ANN401
    """A runner with adapters whose graphs, replayed, run their function again."""
    import torch
    from runner import fake_device

    from tokenloom.bench.device import lab as labs
    from tokenloom.bench.device.results import Report
    from tokenloom.bench.device.rig import HostTimer, Rig
    from tokenloom.bench.device.sizes import Sizes
    from tokenloom.bench.device.steps import load, random_adapter
    from tokenloom.wire.scheduling_config import SchedulingConfig

    fake_device.FakeGraph.replay = lambda self: self.run()  # type: ignore[method-assign, assignment, return-value]
    sizes = Sizes(large=CONFIG, dtype=torch.bfloat16)
    lab = labs.Lab(Rig(fake_device.FakeDevice(free=1 << 28), HostTimer()), sizes)
    adapter = random_adapter(lab, lab.spec, torch.bfloat16, 16)
    bench = lab.runner(
        lab.model(),
        tokens=ROWS * PAGES * PAGE,
        rows=ROWS,
        adapters=labs.Adapters(2, 16, {"1": adapter, "2": adapter}),
        scheduling=SchedulingConfig(
            max_running_requests=ROWS, max_prefill_tokens=128, chunked_prefill_size=128
        ),
    )
    load(bench, ["1", "2"], Report(60.0, HostTimer().mark))
    bench.put_adapters([(1, 1), (2, 2)])
    bench.runner.loras.close()
    return bench


def openings() -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Rows that ask the sampler for different things."""
    from tokenloom.scheduler_proc.worker_batch import RowOpen
    from tokenloom.wire.sampling import SamplingParams

    wishes = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=1, top_p=0.9),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=3, min_p=0.1, logit_bias={3: 1.0}),
    ]
    prompt, nothing = array("i", [1, 2, 3]), array("i")
    rows = [RowOpen(row, wishes[row % 5], prompt, nothing, ()) for row in range(ROWS)]
    pages = [(row, page, 1 + row * PAGES + page) for row in range(ROWS) for page in range(PAGES)]
    return rows, pages


def random_step(random: Random, opened: list[Any], new_pages: list[tuple[int, int, int]]) -> Any:  # noqa: ANN401
    """Decodes, extends or both, of any rows, with adapters or without."""
    from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch

    count = random.randint(1, ROWS)
    decodes = random.choice([0, count, random.randint(0, count)])
    others = count - decodes
    extends = [1] * decodes + [random.randint(1, 13) for _ in range(others)]
    slots = [random.randint(0, 2) for _ in range(count)]
    kinds = {0: ForwardMode.EXTEND, count: ForwardMode.DECODE}
    return ModelWorkerBatch(
        step=1,
        mode=kinds.get(decodes, ForwardMode.MIXED),
        num_decodes=decodes,
        rows=random.sample(range(ROWS), count),
        prefix_lens=[random.randint(1, 40) for _ in range(decodes)]
        + [random.choice([0, 16]) for _ in range(others)],
        extend_lens=extends,
        samples=[True] * decodes + [random.random() < 0.7 for _ in range(others)],
        input_ids=array("i", [5] * sum(extends[decodes:])),
        new_pages=new_pages,
        opened=opened,
        lora_slots=slots if any(slots) and random.random() < 0.6 else [],
    )


if __name__ == "__main__":
    main()
