"""KVEventLog: the pages that the prefix tree stored and removed, identified by chained hashes.

Fed by core/radix_cache.py if kv_events is set; taken by event_loop.py. A page's id hashes its
tokens and the id of the page above, so equal prefixes have equal ids in every run; the first page
is chained to a hash of its namespace, which itself is never published. PURE.
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
        """Log a run of pages below the one with id `parent` (None: the root); return their ids."""
        ids = array("i", key)
        page_bytes = self._page_size * ids.itemsize
        above = _hash(namespace) if parent is None else _bytes_of(parent)
        hashes = []
        for start in range(0, len(key), page_bytes):
            above = _hash(above + key[start : start + page_bytes])
            hashes.append(int.from_bytes(above, "little", signed=True))
        self._events.append(BlockStored(hashes, parent, ids.tolist(), self._page_size))
        return list(hashes)  # a copy: the tree may cut its list before the event is sent

    def removed(self, hashes: list[int]) -> None:
        self._events.append(BlockRemoved(hashes))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Take the events since the last call, in order."""
        events, self._events = self._events, []
        return events


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


def _bytes_of(block_hash: int) -> bytes:
    return block_hash.to_bytes(HASH_BYTES, "little", signed=True)
