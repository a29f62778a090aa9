"""KVEventLog: what the prefix tree stored and removed since it was last asked, by chained hashes.

Fed by core/radix_cache.py, only where events are wanted; taken once a step by event_loop.py. The id
of a page is a hash of its tokens and of the id of the page above, so equal prefixes have equal ids
in every run; the first page is chained to its namespace, which stays private itself. PURE.
"""

from array import array
from hashlib import blake2b

from ...wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

HASH_BYTES = 8


class KVEventLog:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVEvent] = []

    def stored(self, parent: int | None, namespace: bytes, key: bytes) -> list[int]:
        """A run of pages below the one with id `parent`; returns their ids."""
        ids = array("i", key)
        page_bytes = self._page_size * ids.itemsize
        above = _hash(namespace) if parent is None else _bytes_of(parent)
        hashes = []
        for start in range(0, len(key), page_bytes):
            above = _hash(above + key[start : start + page_bytes])
            hashes.append(int.from_bytes(above, "little", signed=True))
        self._events.append(BlockStored(hashes, parent, ids.tolist(), self._page_size))
        return list(hashes)  # the tree cuts its own list before the event is sent

    def removed(self, hashes: list[int]) -> None:
        self._events.append(BlockRemoved(hashes))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Everything since the last call, in the order in which it happened."""
        events, self._events = self._events, []
        return events


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


def _bytes_of(block_hash: int) -> bytes:
    return block_hash.to_bytes(HASH_BYTES, "little", signed=True)
