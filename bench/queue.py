"""Cost of the waiting queue per step: `python -m tokenloom.bench.queue`.

Drives the scheduler core alone: prompts are answered with made-up tokens, as many requests arrive
as have started, and the prefix tree grows and is evicted at each step. A pass plans one step,
decodes and page allocation included.
"""

import argparse
import gc
import random
import time
from array import array
from collections.abc import Callable
from statistics import median, quantiles
from typing import get_args

from ..scheduler_proc.core.intake import Limits
from ..scheduler_proc.core.scheduler import Scheduler
from ..scheduler_proc.worker_batch import BatchResult
from ..wire.messages import TokenizedGenerateReq
from ..wire.sampling import SamplingParams
from ..wire.scheduling_config import SchedulePolicy, SchedulingConfig

PAGE, POOL_TOKENS, VOCAB = 16, 1 << 16, 32000
TAIL, ANSWER = 64, 4
PREFIXES, PREFIX_TOKENS = 400, 256
PASSES = 300

Prompt = Callable[[random.Random], list[int]]


def _ids(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % VOCAB for i in range(count)]


def shared(rng: random.Random) -> list[int]:
    """Prompt with one of many prefixes, few of them popular, and its own tail."""
    prefix = min(int(rng.paretovariate(0.8)), PREFIXES)
    return _ids(prefix, PREFIX_TOKENS) + [rng.randrange(VOCAB) for _ in range(TAIL)]


def same(rng: random.Random) -> list[int]:
    """Prompt with the one common prefix."""
    return _ids(0, PREFIX_TOKENS) + [rng.randrange(VOCAB) for _ in range(TAIL)]


def cold(rng: random.Random) -> list[int]:
    """Prompt that shares nothing."""
    return [rng.randrange(VOCAB) for _ in range(PREFIX_TOKENS + TAIL)]


PROMPTS: dict[str, Prompt] = {"shared": shared, "same": same, "cold": cold}


class Load:
    """A scheduler with `waiting` requests in its queue at each pass."""

    def __init__(self, settings: SchedulingConfig, prompt: Prompt, waiting: int) -> None:
        num_pages = POOL_TOKENS // PAGE + 1
        limits = Limits(VOCAB, 1024, POOL_TOKENS, frozenset())
        self._scheduler = Scheduler(settings, limits, num_pages)
        self._rng = random.Random(0)
        self._prompt = prompt
        self._waiting = waiting
        self._rid = 0

    def passes(self, count: int) -> list[float]:
        """Return processor seconds of each pass; other processes do not count."""
        times = []
        for _ in range(count):
            while self._scheduler.stats().waiting < self._waiting:
                self._arrive()
            start = time.thread_time()
            batch = self._scheduler.get_next_batch_to_run()
            times.append(time.thread_time() - start)
            assert batch is not None
            ids = [self._rng.randrange(VOCAB) for samples in batch.samples if samples]
            self._scheduler.process_batch_result(BatchResult(batch.step, ids))
        return times

    def _arrive(self) -> None:
        self._rid += 1
        sampling = SamplingParams(max_new_tokens=ANSWER, seed=0)
        self._scheduler.handle(
            TokenizedGenerateReq(
                self._rid,
                array("i", self._prompt(self._rng)).tobytes(),
                sampling,
                priority=self._rng.randrange(4),
                tenant=str(self._rng.randrange(1000)),
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds of the scheduler for each pass.")
    parser.add_argument("--waiting", type=int, nargs="*", default=[100, 1000, 10000], metavar="N")
    parser.add_argument("--passes", type=int, default=PASSES, help="(default: %(default)s)")
    flags = parser.parse_args()
    gc.disable()  # garbage collection is not part of a pass
    print("prompts  policy      fairness  waiting  median ms   p99 ms   max ms")
    for kind, prompt in PROMPTS.items():
        for policy in get_args(SchedulePolicy):
            for fairness in ("none", "vtc"):
                settings = SchedulingConfig(
                    schedule_policy=policy,
                    fairness=fairness,
                    mixed_chunk_size=0,  # so that each pass starts requests
                )
                for waiting in flags.waiting:
                    times = Load(settings, prompt, waiting).passes(flags.passes)
                    half, last, worst = median(times), quantiles(times, n=100)[-1], max(times)
                    print(
                        f"{kind:8} {policy:11} {fairness:8} {waiting:8} "
                        f"{half * 1e3:10.2f} {last * 1e3:8.2f} {worst * 1e3:8.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
