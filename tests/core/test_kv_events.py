"""What the tree says of itself: whoever replays the events holds the tree, hash by hash."""

import random

from support.scheduling import Bench

from tokenloom.scheduler_proc.core.kv_events import KVEventLog
from tokenloom.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tokenloom.wire.messages import FlushReq

Ids = tuple[int, ...]


class Replica:
    """A reader of the stream: every cached page as the ids of its whole prefix."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.prefixes: dict[int, Ids] = {}

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved(block_hashes=hashes):
                    for one in hashes:
                        gone = self.prefixes.pop(one)
                        longer = [ids for ids in self.prefixes.values() if ids[: len(gone)] == gone]
                        assert not longer or gone in longer, "removed before what is below it"
                case AllBlocksCleared():
                    self.prefixes.clear()

    def store(self, event: BlockStored) -> None:
        above = () if event.parent_block_hash is None else self.prefixes[event.parent_block_hash]
        assert event.block_size == self.page_size
        assert len(event.token_ids) == len(event.block_hashes) * self.page_size
        for i, one in enumerate(event.block_hashes):
            above += tuple(event.token_ids[i * self.page_size : (i + 1) * self.page_size])
            assert one not in self.prefixes, "stored twice"
            assert -(1 << 63) <= one < 1 << 63
            self.prefixes[one] = above


def in_tree(bench: Bench) -> dict[int, Ids]:
    found = {}
    size = bench.scheduler._kv.page_size
    for node in bench.scheduler._kv.tree.nodes():
        above, step = b"", node
        while step.parent is not None:
            above, step = step.key + above, step.parent
        ids = tuple(memoryview(above).cast("i"))
        for i, one in enumerate(node.hashes):
            found[one] = ids[: (node.start + i + 1) * size]
    assert len(found) == bench.scheduler.stats().tree_pages
    return found


def test_a_replica_of_the_events_is_the_tree() -> None:
    bench = Bench(pool_tokens=256, events=True)
    replica = Replica(4)
    draw = random.Random(1)
    for i in range(120):
        prefix = [draw.randrange(1, 4)] * draw.choice([0, 8, 20])
        tail = [draw.randrange(1, 90) for _ in range(draw.randrange(1, 30))]
        bench.submit(prefix + tail, draw.randrange(1, 20), namespace=draw.choice(["", "a"]))
        for _ in range(draw.randrange(4)):
            bench.step()
        if i % 40 == 39:
            bench.run()
            bench.send(FlushReq(i))
        replica.apply(bench.scheduler.take_kv_events())
        assert replica.prefixes == in_tree(bench)
    assert bench.scheduler.stats().evicted_pages_total > 100
    assert len(bench.flushed) == 3


def test_ids_are_the_same_in_every_run_and_say_what_stands_above() -> None:
    first, second = KVEventLog(1), KVEventLog(1)
    key = (7).to_bytes(4, "little")
    a, b = first.stored(None, b"", key * 2)
    assert second.stored(None, b"", key) == [a]
    assert second.stored(a, b"", key) == [b]
    assert a != b, "the same page below another one is another page"
    assert second.stored(None, b"salt", key) != [a], "and in another namespace"
    after_a_restart = [-5918123387502551045, 3496985138897520942]
    assert [a, b] == after_a_restart


def test_nothing_is_recorded_unless_wanted() -> None:
    bench = Bench()
    bench.submit([5] * 40, 4)
    bench.run()
    assert bench.scheduler.take_kv_events() == []
    assert all(not node.hashes for node in bench.scheduler._kv.tree.nodes())
