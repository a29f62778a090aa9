"""What the tree says of itself: whoever replays the events holds the tree, hash by hash."""

import random

from support.kv_replica import Replica, in_tree
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.kv_events import KVEventLog
from tokenloom.scheduler_proc.core.radix_cache import RadixCache
from tokenloom.wire.messages import FlushReq


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


def test_an_eviction_that_finds_nothing_is_no_event() -> None:
    log = KVEventLog(1)
    tree = RadixCache(1, events=log)
    assert tree.evict(3) == []
    assert log.take() == []


def test_a_tree_chains_its_first_page_to_the_namespace_alone() -> None:
    log, key = KVEventLog(2), bytes(range(24))
    tree = RadixCache(2, events=log)
    for namespace in (b"", b"salt"):
        node = tree.insert(tree.root, key, [1, 2, 3], namespace).node
        assert node.hashes == KVEventLog(2).stored(None, namespace, key)
