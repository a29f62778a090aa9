"""KV events in the form that routers and viewers of prefix caches read; a map tagged by type each.

Made by scheduler_proc/core/kv_events.py, published by scheduler_proc/kv_event_publisher.py. The
form is public and not ours to change. PURE.
"""

from typing import Literal

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag_field="type"):
    """Pages that can be found from now on: consecutive, each the child of the one before."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: Literal["GPU"] = "GPU"  # the form's word for the pool that the model computes from


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
