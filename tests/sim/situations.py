"""Which situations a run has met, and how often it must: a tame workload proves nothing."""

from collections import Counter
from collections.abc import Callable

from tokenloom.scheduler_proc.core.lora_slots import Adapter
from tokenloom.scheduler_proc.core.radix_cache import Inserted, TreeNode
from tokenloom.scheduler_proc.core.req import Req, ReqState
from tokenloom.scheduler_proc.core.scheduler import Scheduler
from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch
from tokenloom.wire.messages import Finish

# at least so many in 100,000 steps; well under what the workload gives, well over nothing
EXPECTED = {
    "a name replaced": 500,
    "a kept slot taken": 300,
    "a slot kept, in use": 3000,
    "a slot kept: dfs-weight": 10,
    "a slot kept: fcfs": 10,
    "a slot kept: hrrn": 10,
    "a slot kept: lpm": 10,
    "a slot kept: priority": 10,
    "abort: again in flight": 300,
    "abort: between chunks": 50,
    "abort: between chunks, in flight": 20,
    "abort: decoding": 250,
    "abort: decoding, in flight": 300,
    "abort: decoding, in two steps in flight": 60,
    "abort: finished": 300,
    "abort: unknown": 20,
    "abort: waiting": 300,
    "abort: waiting, retracted": 4,
    "admitted: again": 80,
    "admitted: protected": 1,
    "audit: in slices": 100,
    "broken sample": 60,
    "drain, between steps": 5,
    "drain, step in flight": 5,
    "drain, while loading": 1,
    "duplicates at insert": 80,
    "eviction: a node": 6000,
    "eviction: a parent after its child": 200,
    "eviction: a part of a node": 6000,
    "flush: done": 60,
    "flush: refused": 400,
    "hit: a part": 400,
    "hit: all but the last page": 300,
    "hit: none": 2000,
    "length: context": 300,
    "length: pool": 300,
    "load: an id again": 5,
    "load: failed": 100,
    "load: of a name in use": 500,
    "prompt cut": 3000,
    "prompt cut for the goal of a gap": 100,
    "refused: beyond its share": 20,
    "refused: displaced": 20,
    "refused: draining": 100,
    "ended: the drain takes too long": 5,
    "refused: no such adapter": 400,
    "refused: too long": 200,
    "retraction: decoding": 80,
    "retraction: several in a step": 20,
    "rid in use sent again": 30,
    "slot cleared": 200,
    "slot written": 500,
    "split": 60,
    "split of a locked node": 40,
    "nothing scarce": 1000,
    "nothing scarce: a crowd": 5,
    "planned after a result": 500,
    "step: beside another in flight": 10_000,
    "step: extend": 3000,
    "step: mixed": 3000,
    "step: several adapters": 500,
    "stop: between chunks": 15,
    "stop: decoding": 200,
    "stop: decoding, in flight": 250,
    "stop: decoding, in two steps in flight": 60,
    "stop: finished": 200,
    "stop: unknown": 12,
    "stop: waiting": 250,
    "stop: waiting, retracted": 2,
    "the first in order waits for a slot": 5,
    "told in flight: abort": 500,
    "told in flight: error": 500,
    "told in flight: stop": 500,
    "unload: in flight": 40,
    "unload: retracted": 2,
    "unload: running": 60,
    "unload: unused": 500,
    "unload: waiting": 80,
    "unload: while loading": 4,
    "waiting: a crowd": 1000,
    "waiting: no room or budget": 10_000,
    "waiting: no row": 4000,
    "whole ones before a piece": 100,
}


PROTECTED_AFTER = 2  # retractions


class Situations:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.trace = 0  # a hash of all decisions of all worlds

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] += times

    def missing(self) -> dict[str, str]:
        """What was met too seldom, and how often it should have been. A short run may miss any."""
        if self.steps < 100_000:
            return {}
        wanted = {name: low * self.steps // 100_000 for name, low in EXPECTED.items()}
        return {
            name: f"{self.counts[name]} of {low}"
            for name, low in wanted.items()
            if self.counts[name] < low
        }

    def ending(self, kind: str, core: Scheduler, rid: int) -> None:
        """A client or the detokenizer ends `rid`, which is live, whatever state it is in."""
        req = core._reqs[rid]
        where = req.state.value
        if req.state is ReqState.WAITING and req.retractions:
            where = "waiting, retracted"
        elif req.state is ReqState.EXTENDING and req is core._chunked:
            where = "between chunks"
        if req.state is not ReqState.WAITING and core._launched:
            steps = sum(req in batch.reqs for batch in core._launched)
            where += (", beside a step in flight", ", in flight", ", in two steps in flight")[steps]
        self.count(f"{kind}: {where}")

    def told(self, core: Scheduler, rid: int, finish: Finish) -> None:
        """The end of `rid` has been said; its row may be in a step that was launched meanwhile."""
        if rid in core._reqs:
            assert finish.reason != "length", "a step was launched beyond the limit"
            self.count(f"told in flight: {finish.reason}")

    def nothing_planned(self, core: Scheduler) -> None:
        if core._settle_first:
            self.count("planned after a result")
        elif core._launched and core._reqs:
            self.count("nothing to plan, step in flight")

    def step(self, core: Scheduler, batch: ModelWorkerBatch) -> None:
        self.steps += 1
        self.count(f"step: {batch.mode.value}")
        if len(core._launched) > 1:
            self.count("step: beside another in flight")
        if len(core._waiting):
            full = not core._kv.rows.available
            self.count("waiting: no row" if full else "waiting: no room or budget")
            if len(core._waiting) > 4 * core._kv.rows.capacity:
                self.count("waiting: a crowd")
        if batch.mode is not ForwardMode.DECODE and core._chunked is not None:
            self.count("prompt cut")
            room = core._budget._most - batch.num_decodes - core._kv.page_size
            goal = batch.num_decodes > 0 and core._settings.mixed_chunk_size is None
            if goal and len(batch.input_ids) < room:
                self.count("prompt cut for the goal of a gap")
            new = {entry.sampling.seed for entry in batch.opened}
            if new and core._chunked.rid not in new:
                self.count("whole ones before a piece")

    def admission(self, core: Scheduler, rid: int) -> None:
        req = core._reqs[rid]
        assert req.kv is not None
        size = core._kv.page_size
        if req.retractions >= PROTECTED_AFTER:
            self.count("admitted: protected")
        elif req.retractions:
            self.count("admitted: again")
        if req.kv.tree_pages == (len(req.ids) - 1) // size and req.kv.tree_pages:
            self.count("hit: all but the last page")
        elif req.kv.tree_pages:
            self.count("hit: a part")
        else:
            self.count("hit: none")


def watch(core: Scheduler, count: Callable[[str], None]) -> None:
    """Count what happens inside the tree and the pool, and hold evictions to their laws."""
    tree = core._kv.tree
    evictable = 0  # when the eviction began
    below: set[int] = set()  # parents of what it has detached so far
    dropped = 0  # pages of the detached nodes

    def splitting(node: TreeNode, *_: int) -> None:
        count("split of a locked node" if node.lock_count else "split")

    def detaching(leaf: TreeNode) -> None:
        assert leaf.is_evictable_leaf(), "I3: a locked or inner node was evicted"
        nonlocal dropped
        if leaf.uid in below:
            count("eviction: a parent after its child")
        assert leaf.parent is not None
        below.add(leaf.parent.uid)
        dropped += len(leaf.pages)
        count("eviction: a node")

    def evicting(wanted: int) -> None:
        nonlocal evictable, dropped
        below.clear()
        evictable, dropped = tree.evictable_pages, 0

    def evicted(pages: list[int], wanted: int) -> None:
        assert len(pages) >= min(wanted, evictable), "I13: too little evicted"
        if len(pages) > dropped:
            count("eviction: a part of a node")
        if len(pages) < wanted:
            count("eviction: not enough")

    def inserted(result: Inserted, *_: object) -> None:
        if result.duplicates:
            count("duplicates at insert")

    def retracting(req: Req) -> None:
        count(f"retraction: {req.state.value}")
        if req.retractions >= PROTECTED_AFTER:
            count("retraction: protected")

    _wrap(tree, "_split", before=splitting)
    _wrap(tree, "_detach", before=detaching)
    _wrap(tree, "evict", before=evicting, after=evicted)
    _wrap(tree, "insert", after=inserted)
    _wrap(core, "_retract", before=retracting)
    _watch_slots(core, count)
    _watch_retractions(core, count)


def _watch_retractions(core: Scheduler, count: Callable[[str], None]) -> None:
    """However many there are, a step looks once at each that runs."""
    looks = running = retractions = 0

    def starting() -> None:
        nonlocal looks, running, retractions
        looks, running, retractions = 0, len(core._running), core.totals.retractions

    def looking(*_: object) -> None:
        nonlocal looks
        looks += 1

    def ending(*_: object) -> None:
        assert looks <= running, "I23: retractions cost more than one look at each request"
        if core.totals.retractions > retractions + 1:
            count("retraction: several in a step")

    _wrap(core._kv, "is_full", before=looking)
    _wrap(core, "_decodes_with_room", before=starting, after=ending)


def _watch_slots(core: Scheduler, count: Callable[[str], None]) -> None:
    loras, policy = core._loras, core._settings.schedule_policy

    def kept(_: None, adapter: Adapter) -> None:
        if adapter in loras._kept.values():
            count(f"a slot kept: {policy}")

    def taking(adapter: Adapter, slot: int) -> None:
        if loras._kept.get(slot) is adapter:
            count("a kept slot taken")

    _wrap(loras, "_keep_a_slot", after=kept)
    _wrap(loras, "_take_slot", before=taking)


def _wrap(
    owner: object,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    inner = getattr(owner, name)

    def call(*args: object) -> object:
        if before is not None:
            before(*args)
        result = inner(*args)
        if after is not None:
            after(result, *args)
        return result

    setattr(owner, name, call)
