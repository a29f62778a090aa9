"""Cost of the scheduler's core: `python -m tokenloom.bench.core_ops` prints a table.

Times the prefix tree at the sizes of a busy server, and whole scheduler steps without a model.
Correctness is tests/core's work. One process, one thread, garbage collector on.
"""

import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles

from ..scheduler_proc.core.intake import Limits
from ..scheduler_proc.core.kv_cache import KVCache
from ..scheduler_proc.core.radix_cache import Match, RadixCache
from ..scheduler_proc.core.req import Req
from ..scheduler_proc.core.scheduler import Scheduler
from ..scheduler_proc.worker_batch import BatchResult
from ..wire.messages import TokenizedGenerateReq
from ..wire.sampling import SamplingParams
from ..wire.scheduling_config import SchedulingConfig

PAGE = 16
VOCAB = 50_000
LONG = 32_768  # tokens of the long prompt
TREE_NODES = 100_000
POOL_PAGES = 1_000_000
DECODES = 256
WAITING = 10_000

Row = tuple[str, list[float]]  # an operation, and the seconds of each run


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def look(tree: RadixCache, ids: "array[int]") -> Match:
    return tree.match(ids.tobytes())


class Filler:
    """Prompts of random ids, and pages for them."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._last_page = 0

    def ids(self, count: int) -> "array[int]":
        return array("i", self._draw.choices(range(1, VOCAB), k=count))

    def pages(self, count: int) -> list[int]:
        self._last_page += count
        return list(range(self._last_page - count + 1, self._last_page + 1))

    def leave(self, tree: RadixCache, ids: "array[int]") -> None:
        """Insert `ids` in the tree as a finished request does."""
        node = tree.lock(tree.match(ids.tobytes()))
        done = (node.start + len(node.pages)) * PAGE
        rest = ids[done:].tobytes()
        tree.unlock(tree.insert(node, rest, self.pages((len(ids) - done) // PAGE)).node)

    def tree_of_nodes(self, long: "array[int]", forks: int) -> RadixCache:
        """Build a tree in which `forks` prompts branch off a long one; short ones fill the rest."""
        tree = RadixCache(PAGE)
        self.leave(tree, long)
        for fork in range(1, forks + 1):
            way = LONG // PAGE * fork // (forks + 1) * PAGE
            self.leave(tree, long[:way] + self.ids(PAGE))
        while tree.num_nodes < TREE_NODES:
            stem = self.ids(2 * PAGE)
            for _ in range(8):
                self.leave(tree, stem + self.ids(PAGE))
        return tree

    def tree_of_pages(self) -> RadixCache:
        """Build a tree that fills the pool: stems of 10 pages, each with ten ends of 9 pages."""
        tree = RadixCache(PAGE)
        while tree.evictable_pages < POOL_PAGES:
            stem = self.ids(10 * PAGE)
            for _ in range(10):
                self.leave(tree, stem + self.ids(9 * PAGE))
        return tree


def match_rows(filler: Filler) -> Iterator[Row]:
    long = filler.ids(LONG)
    for forks in (0, 64, 1024):
        tree = filler.tree_of_nodes(long, forks)
        for name, ids in (("whole", long), ("half", long[: LONG // 2] + filler.ids(LONG // 2))):
            runs = [timed(partial(look, tree, ids)) for _ in range(200)]
            yield f"match 32k tokens, {name} found, {forks + 1} nodes deep", runs


def queue_rows(filler: Filler) -> Iterator[Row]:
    """Time matching every waiting request, as some policies do; half of them hit."""
    kv = KVCache(SchedulingConfig(page_size=PAGE), POOL_PAGES)
    stems = [filler.ids(2 * PAGE) for _ in range(16)]
    for stem in stems:
        filler.leave(kv.tree, stem)
    prompts = [
        (stems[i % 16] if i % 2 else filler.ids(2 * PAGE)) + filler.ids(480) for i in range(WAITING)
    ]
    reqs = [
        Req(i, i, SamplingParams(), ids, len(ids), 1, frozenset()) for i, ids in enumerate(prompts)
    ]

    def look_at_all() -> None:
        for req in reqs:
            kv.match(req)

    look_at_all()
    yield f"look at {WAITING:,} waiting again", [timed(look_at_all) for _ in range(20)]
    runs = []
    for _ in range(20):
        filler.leave(kv.tree, filler.ids(PAGE))
        runs.append(timed(look_at_all))
    yield f"look at {WAITING:,} waiting, a new prompt came in", runs


def change_rows(filler: Filler) -> Iterator[Row]:
    tree = filler.tree_of_nodes(filler.ids(LONG), 64)
    prompts = [filler.ids(LONG) for _ in range(50)]
    yield "insert 32k tokens", [timed(partial(filler.leave, tree, ids)) for ids in prompts]
    short = [filler.ids(PAGE) for _ in range(1000)]
    yield "insert a page", [timed(partial(filler.leave, tree, ids)) for ids in short]
    halves = [look(tree, ids[: LONG // 2]) for ids in prompts]
    yield "lock half of 32k tokens: a split", [timed(partial(tree.lock, half)) for half in halves]


def evict_rows(filler: Filler) -> Iterator[Row]:
    tree = filler.tree_of_pages()
    for count in (1, 100, 10_000):
        runs = [timed(partial(tree.evict, count)) for _ in range(20)]
        yield f"evict {count:,} of {POOL_PAGES:,} pages", runs


class Steps:
    """A scheduler that decodes in all its rows, with a model that returns a constant id."""

    def __init__(self, filler: Filler, waiting: int) -> None:
        settings = SchedulingConfig(
            max_running_requests=DECODES, chunked_prefill_size=1 << 20, mixed_chunk_size=0,
            max_prefill_tokens=1 << 20,
        )  # fmt: skip
        limits = Limits(VOCAB, LONG, POOL_PAGES * PAGE, frozenset({0}))
        self.scheduler = Scheduler(settings, limits, POOL_PAGES + 1)
        params = SamplingParams(max_new_tokens=4096, seed=0)
        for rid in range(1, DECODES + waiting + 1):
            ids = filler.ids(500 + rid % (2 * PAGE)).tobytes()
            self.scheduler.handle(TokenizedGenerateReq(rid, ids, params))
        self.once()

    def once(self) -> tuple[float, float]:
        """Run one step; return the seconds to plan it and to commit its result."""
        start = time.perf_counter()
        batch = self.scheduler.get_next_batch_to_run()
        planned = time.perf_counter()
        assert batch is not None
        result = BatchResult(batch.step, [7] * sum(batch.samples))
        run = time.perf_counter()
        self.scheduler.process_batch_result(result)
        return planned - start, time.perf_counter() - run


def step_rows(filler: Filler) -> Iterator[Row]:
    for waiting in (0, 1000):
        steps = Steps(filler, waiting)
        runs = [steps.once() for _ in range(500)]
        name = f"of a step of {DECODES} decodes, {waiting} waiting"
        yield f"plan {name}", [plan for plan, _ in runs]
        yield f"commit {name}", [commit for _, commit in runs]
        yield f"plan and commit {name}", [plan + commit for plan, commit in runs]


def main() -> int:
    filler = Filler()
    print("| operation | median, us | p90, us |\n|---|---:|---:|")
    for rows in (match_rows, queue_rows, change_rows, evict_rows, step_rows):
        for name, runs in rows(filler):
            slow = quantiles(runs, n=10)[-1]
            print(f"| {name} | {median(runs) * 1e6:,.1f} | {slow * 1e6:,.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
