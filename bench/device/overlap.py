"""Step time in the scheduler's loop: eager, from graphs, and overlapped."""

from itertools import pairwise
from random import Random
from statistics import median

from ...scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch
from ...wire.sampling import SamplingParams
from .lab import Lab, RunnerBench
from .loop import Mailbox, Request, Watched, serve
from .results import Report
from .steps import OVERLAP_AIM


def loop(lab: Lab, report: Report) -> None:
    """Rows and context of the aims. Medians of full decode steps, on the device and between
    two of them: their quotient is 1 where the host is hidden.
    """
    bench = lab.bench()
    for name, overlap in (("graphs", False), ("graphs, overlapped", True)):
        if report.has_time(name, 1.0):
            _measure(lab, bench, name, report, overlap=overlap)
    if not report.has_time("eager", 5.0):
        return
    rows, context = lab.sizes.aimed
    tokens = rows * (context + lab.sizes.loop_answer)
    lab.release_runner()
    eager = lab.runner(lab.model(), tokens=tokens, rows=rows, graphs=False)
    _measure(lab, eager, "eager", report, overlap=False)


def _measure(lab: Lab, bench: RunnerBench, name: str, report: Report, *, overlap: bool) -> None:
    rows, context = lab.sizes.aimed
    random, answer = Random(0), lab.sizes.loop_answer
    sampling = SamplingParams(temperature=0.0, max_new_tokens=answer, seed=0, ignore_eos=True)
    vocab = range(bench.runner.facts.vocab_size)
    requests = [
        Request(rid, tuple(random.choices(vocab, k=context - answer)), sampling)
        for rid in range(1, rows + 1)
    ]
    full: list[bool] = []

    def note(batch: ModelWorkerBatch) -> None:
        if any(batch.samples):  # else it has no span
            full.append(batch.mode is ForwardMode.DECODE and len(batch.rows) == rows)

    bench.device.take_seconds()
    watched = Watched(bench, before=note)
    serve(bench, Mailbox(requests, [], rows, report), watched, overlap=overlap)
    device, wall = _of_full_steps(bench, full)
    report.add(f"{name}: step", wall * 1e3, "ms", note=f"{device * 1e3:.3g} ms on the device")
    aim = OVERLAP_AIM if overlap else None
    report.add(f"{name}: over the device", wall / device, aim=aim, at_most=True)


def _of_full_steps(bench: RunnerBench, full: list[bool]) -> tuple[float, float]:
    """Median seconds on the device, and median seconds from one full step's end to the next's."""
    timer, spans = bench.device.timer, bench.device.take_spans()
    inside = [timer.seconds(*span) for span, counts in zip(spans, full, strict=True) if counts]
    ends = list(zip([end for _, end in spans], full, strict=True))
    apart = [
        timer.seconds(one, two)
        for (one, first), (two, second) in pairwise(ends)
        if first and second
    ]
    return median(inside), median(apart)
