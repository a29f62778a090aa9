"""Faults that tests inject, so that rare events happen often. Production injects none.

Given to the Scheduler's constructor; asked by core/scheduler.py and core/kv_cache.py. PURE.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Faults:
    """Each fault strikes at every n-th occasion; 0: never."""

    retract_every: int = 0  # steps: retract one request without need, unless all are protected
    miss_every: int = 0  # lookups in the prefix tree: find nothing
    fail_allocation_every: int = 0  # allocations of pages to a request: fail
    steps: int = 0
    looks: int = 0
    allocations: int = 0

    def retracts(self) -> bool:
        self.steps += 1
        return self.retract_every > 0 and self.steps % self.retract_every == 0

    def postpone_retraction(self) -> None:
        """Let the next step retract instead, because this one must await outstanding results."""
        self.steps -= 1

    def misses(self) -> bool:
        self.looks += 1
        return self.miss_every > 0 and self.looks % self.miss_every == 0

    def fails_allocation(self) -> bool:
        self.allocations += 1
        every = self.fail_allocation_every
        return every > 0 and self.allocations % every == 0
