"""Replica: a subscriber of KV events, to compare with the contents of the prefix tree."""

from support.scheduling import Bench

from tokenloom.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

Ids = tuple[int, ...]


class Replica:
    """Cached pages rebuilt from events, each as the ids of its whole prefix."""

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
