"""Totals: the scheduler's counters since its start, and the snapshot of statistics. PURE.

Owned by core/scheduler.py.
"""

from dataclasses import dataclass

from ...wire.messages import StatsOut
from .kv_cache import KVCache


@dataclass(slots=True, frozen=True)
class QueueCounts:
    step: int
    running: int
    waiting: int


@dataclass(slots=True)
class Totals:
    """Counters since the start; they never fall."""

    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    violations: int = 0

    def snapshot(self, seq: int, counts: QueueCounts, kv: KVCache, ratio: float) -> StatsOut:
        free, evictable = kv.pages.available, kv.tree.evictable_pages
        return StatsOut(
            seq=seq,
            step=counts.step,
            running=counts.running,
            waiting=counts.waiting,
            used_tokens=(kv.pages.capacity - free - evictable) * kv.page_size,
            evictable_tokens=evictable * kv.page_size,
            free_tokens=free * kv.page_size,
            free_rows=kv.rows.available,
            new_token_ratio=ratio,
            retractions_total=self.retractions,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generated_tokens_total=self.generated_tokens,
            violations_total=self.violations,
            evicted_pages_total=kv.tree.evicted_total,
            tree_nodes=kv.tree.num_nodes,
            tree_pages=evictable + kv.tree.locked_pages,
        )
