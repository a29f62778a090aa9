"""StepLog: log lines about steps, with the fields of SGLang's log.

One line per step that computes prompt tokens, one per 40 decode steps. Called by event_loop.py.
"""

import logging
import time

from .core.scheduler import Scheduler
from .worker_batch import ForwardMode, ModelWorkerBatch

DECODE_INTERVAL = 40

log = logging.getLogger(__name__)


class StepLog:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._decode_steps = 0
        self._generated = 0
        self._prefill_since = self._decode_since = time.monotonic()

    def after(self, batch: ModelWorkerBatch, how: str) -> None:
        """Log a step after its result has been processed; `how` is LaunchedStep.how."""
        if batch.mode is not ForwardMode.DECODE:
            self._log_prefill(batch, how)
        if batch.num_decodes:
            self._decode_steps += 1
            if self._decode_steps % DECODE_INTERVAL == 0:
                self._log_decode(how)

    def _log_prefill(self, batch: ModelWorkerBatch, how: str) -> None:
        opened = {entry.row for entry in batch.opened}
        cached = sum(
            prefix
            for row, prefix in zip(batch.rows, batch.prefix_lens, strict=True)
            if row in opened
        )
        new_tokens = sum(batch.extend_lens[batch.num_decodes :])
        now = time.monotonic()
        stats = self._scheduler.stats()
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, input throughput (token/s): %.2f, "
            "cache hit rate: %.2f, #evicted-page: %d, #tree-node: %d, #tree-page: %d%s",
            len(opened),
            new_tokens,
            cached,
            _usage(stats.used_tokens, stats.free_tokens + stats.evictable_tokens),
            stats.running,
            stats.waiting,
            new_tokens / max(now - self._prefill_since, 1e-9),
            stats.cached_tokens_total / max(stats.prompt_tokens_total, 1),
            stats.evicted_pages_total,
            stats.tree_nodes,
            stats.tree_pages,
            how and f", {how}",
        )
        self._prefill_since = now

    def _log_decode(self, how: str) -> None:
        now = time.monotonic()
        stats = self._scheduler.stats()
        generated = stats.generated_tokens_total - self._generated
        log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d, #retracted-req: %d,%s",
            stats.running,
            stats.used_tokens,
            _usage(stats.used_tokens, stats.free_tokens + stats.evictable_tokens),
            generated / max(now - self._decode_since, 1e-9),
            stats.waiting,
            stats.retractions_total,
            how and f" {how},",
        )
        self._decode_since, self._generated = now, stats.generated_tokens_total


def _usage(used: int, rest: int) -> float:
    return used / (used + rest)
