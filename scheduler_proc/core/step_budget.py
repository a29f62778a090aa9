"""StepBudget: how many prompt tokens a step computes beside its decodes. PURE.

Owned by core/scheduler.py, which reports how long steps took. Each prompt token in a step delays
the next token of all running answers, so a step is filled up to a goal for that delay.
"""

from dataclasses import dataclass

from ...wire.scheduling_config import SchedulingConfig
from .schedule_batch import ScheduleBatch
from .step_times import StepTimes

# Without --decode-gap-ms, a step with prompts may take GAP_FACTOR times as long as its decodes
# alone (docs/scheduling.md says why 3), and always LEAST_GAP seconds: people read no faster than 50
# tokens a second.
GAP_FACTOR = 3.0
LEAST_GAP = 20e-3
# Prompts get at least this share of the decodes' time, even where decodes alone exceed the goal, so
# that the queue drains.
PROGRESS = 0.25
# Steps that are all filled up to the goal do not show what decodes alone would take, so after this
# many in a row one step computes only a page of prompt.
PROBE_AFTER = 16


@dataclass(slots=True, frozen=True)
class Budget:
    """Prompt tokens of one step, and whether a prompt may be cut to fit."""

    tokens: int
    cuts: bool


class StepBudget:
    def __init__(self, settings: SchedulingConfig) -> None:
        self._page_size = settings.page_size
        self._cuts = settings.chunked_prefill_size > 0
        self._mixed = settings.mixed_chunk_size
        self._most = settings.max_prefill_tokens
        if self._cuts:
            self._most = min(self._most, settings.chunked_prefill_size)
        gap_ms = settings.decode_gap_ms
        self._goal = None if gap_ms is None else gap_ms / 1e3
        self._filled = 0  # steps in a row that the goal has bounded
        self.times = StepTimes()

    def beside(self, num_decodes: int) -> Budget:
        """The budget beside `num_decodes` decodes: at least a page, so that prompts progress."""
        tokens = self._most - num_decodes
        if num_decodes and self._cuts:
            if self._mixed is None:
                probes = self._filled >= PROBE_AFTER
                tokens = 0 if probes else min(tokens, self._within_the_goal(num_decodes))
            elif self._mixed:
                tokens = min(tokens, self._mixed - num_decodes)
        return Budget(max(self._page_size, tokens), self._cuts)

    def after_step(self, batch: ScheduleBatch, seconds: float | None) -> None:
        """Learn from a step that took `seconds`; None: it was not measured."""
        if seconds is None:
            return
        decodes = len(batch.decodes)
        prompt_tokens = batch.num_tokens - decodes
        filled = decodes > 0 and prompt_tokens > self._within_the_goal(decodes) / 2
        self._filled = self._filled + 1 if filled else 0
        self.times.observe(decodes, prompt_tokens, seconds)

    def _within_the_goal(self, num_decodes: int) -> int:
        alone = self.times.predict(num_decodes, 0)
        goal = max(LEAST_GAP, GAP_FACTOR * alone) if self._goal is None else self._goal
        spare = max(goal - alone, PROGRESS * alone)
        each = self.times.prompt_token
        return self._most if each * self._most <= spare else int(spare / each)
