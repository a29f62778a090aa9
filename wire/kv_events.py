"""KV events in the public msgpack form that prefix-aware routers read; maps tagged by type. PURE.

Made by scheduler_proc/core/kv_events.py, published by scheduler_proc/kv_event_publisher.py. The
form is not ours to change.
"""

from typing import Literal

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag_field="type"):
    """Consecutive pages that entered the prefix cache, each the child of the one before."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: Literal["GPU"] = "GPU"  # names the pool that the model reads, on any device


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type"):
    block_hashes: list[int]
    medium: Literal["GPU"] = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type"):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # seconds since the epoch
    events: list[KVEvent]
    data_parallel_rank: int = 0
