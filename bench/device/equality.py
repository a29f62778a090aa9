"""The same ids from graphs, eagerly, overlapped and alone, over pages full of NaN.

A small model in float32: rounding may differ with the size of a product, and once in some ten
thousand tokens that decides between two. So one request in a hundred may differ, and no more.
"""

from collections import Counter
from random import Random
from typing import Any

import torch

from ...scheduler_proc.models.llama import LlamaForCausalLM
from ...scheduler_proc.runner.cuda_graph import ladder
from ...wire.messages import LoRARef
from ...wire.sampling import SamplingParams
from ...wire.scheduling_config import SchedulingConfig
from .lab import Adapters, Lab, RunnerBench, poison
from .loop import SLOT_WRITES, WAITS, Mailbox, Request, Watched, serve
from .results import CheckFailed, Report
from .sizes import EqualitySizes
from .steps import random_adapter

Answers = dict[int, list[int]]
# What rows of a step may ask for, mixed.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def requests_of(sizes: EqualitySizes, vocab: int) -> list[Request]:
    """Prompts of all lengths, some with a common beginning; answers that end one by one."""
    random = Random(0)
    shared = tuple(random.choices(range(vocab), k=max(1, sizes.prompt // 2)))
    made = []
    for rid in range(1, sizes.requests + 1):
        own = tuple(random.choices(range(vocab), k=random.randint(1, max(1, sizes.prompt // 2))))
        sampling = SamplingParams(
            max_new_tokens=1 + rid % sizes.answer,
            seed=rid,
            ignore_eos=True,
            **KINDS[rid % len(KINDS)],
        )
        lora_id = rid % (sizes.adapters + 1)
        made.append(Request(rid, shared + own if rid % 3 == 0 else own, sampling, lora_id))
    return made


def staircase(first_rid: int, sizes: EqualitySizes, adapters: int) -> list[Request]:
    """Make one request per row, one of which ends with each step, to cover all step sizes."""
    made = []
    for index in range(sizes.most_rows):
        rid = first_rid + index
        sampling = SamplingParams(max_new_tokens=2 + index, seed=rid, ignore_eos=True)
        # the last to end has one, so that every step has
        lora_id = 1 + (sizes.most_rows - 1 - index) % adapters if adapters else 0
        made.append(Request(rid, (rid % 7, index % 5), sampling, lora_id))
    return made


def equality(lab: Lab, report: Report) -> None:
    sizes = lab.sizes.equality
    model, _ = lab.dummy_model(sizes.config, torch.float32)
    mixed = requests_of(sizes, model.spec.vocab_size)
    after = sizes.requests + 1
    groups = [mixed, staircase(after, sizes, 0)]
    if sizes.adapters:
        groups.append(staircase(after + sizes.most_rows, sizes, min(sizes.slots, sizes.adapters)))
    graphs = _runner(lab, model, graphs=True)
    got, how = _answers(graphs, groups, lab, report, overlap=True)
    _check_coverage(how, sizes, report)
    others = {"graphs, not overlapped": (graphs, 1 << 30)}
    others["eager"] = (_runner(lab, model, graphs=False), 1 << 30)
    others["each alone"] = (graphs, 1)
    wrong = []
    for name, (bench, at_once) in others.items():
        if not report.has_time(name, 1.0):
            continue
        expected, _ = _answers(bench, groups, lab, report, overlap=False, at_once=at_once)
        differing = [rid for rid, ids in expected.items() if ids != got[rid]]
        report.add(f"ids as {name}", 1 - len(differing) / len(expected), aim=0.99)
        if len(differing) > len(expected) // 100:
            wrong.append(f"{name}: {len(differing)} requests differ, first {differing[:5]}")
    if wrong:
        raise CheckFailed("; ".join(wrong))


def _runner(lab: Lab, model: LlamaForCausalLM, *, graphs: bool) -> RunnerBench:
    sizes = lab.sizes.equality
    made = {
        str(number): random_adapter(lab, model.spec, torch.float32, sizes.rank, seed=number)
        for number in range(1, sizes.adapters + 1)
    }
    longest = sizes.prompt + sizes.answer
    return lab.runner(
        model,
        tokens=sizes.most_rows * max(longest, sizes.most_rows + 4),
        rows=sizes.most_rows,
        graphs=graphs,
        adapters=Adapters(sizes.slots, sizes.rank, made) if made else None,
        scheduling=SchedulingConfig(
            max_running_requests=sizes.most_rows,
            max_prefill_tokens=sizes.chunk,
            chunked_prefill_size=sizes.chunk,
            mixed_chunk_size=64,  # the same steps in each run, whatever they take
            page_size=sizes.page_size,
        ),
    )


def _answers(
    bench: RunnerBench,
    groups: list[list[Request]],
    lab: Lab,
    report: Report,
    *,
    overlap: bool,
    at_once: int = 1 << 30,
) -> tuple[Answers, Counter[str]]:
    count = lab.sizes.equality.adapters
    names = [LoRARef(number, str(number), str(number)) for number in range(1, count + 1)]
    answers: Answers = {}
    how: Counter[str] = Counter()
    for requests in groups:
        poison(bench.runner)
        mailbox = Mailbox(requests, names, at_once, report)
        watched = Watched(bench)
        serve(bench, mailbox, watched, overlap=overlap)
        how += watched.how
        answers |= mailbox.answers
    bench.device.take_seconds()
    return answers, how


def _check_coverage(how: Counter[str], sizes: EqualitySizes, report: Report) -> None:
    """Every size of the ladder was replayed, without adapters and with them if there are any; and
    with more adapters than slots, one took another's place.
    """
    kinds = ("", " lora") if sizes.adapters else ("",)
    wanted = {f"graph {size}{kind}" for size in ladder(sizes.most_rows) for kind in kinds}
    report.add("graphs replayed", len(wanted & how.keys()), f"of {len(wanted)}")
    report.add(SLOT_WRITES, how[SLOT_WRITES])
    report.add(WAITS, how[WAITS], aim=0, at_most=True)
    if sizes.slots < sizes.adapters and how[SLOT_WRITES] <= sizes.slots:
        raise CheckFailed("no adapter took the slot of another")
    if unused := wanted - how.keys():
        raise CheckFailed(f"no step used {', '.join(sorted(unused))}")
