"""What tests make go wrong, so that what happens rarely happens often. Production injects nothing.

Given to the Scheduler's constructor; asked by core/scheduler.py and core/kv_cache.py. PURE.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Faults:
    """Each comes every so many times it could; 0: never."""

    retract_every: int = 0  # steps: one goes although there is room, unless all are protected
    miss_every: int = 0  # looks into the prefix tree: nothing is found
    fail_allocation_every: int = 0  # times a request is given pages: it gets none
    steps: int = 0
    looks: int = 0
    allocations: int = 0

    def retracts(self) -> bool:
        self.steps += 1
        return self.retract_every > 0 and self.steps % self.retract_every == 0

    def postpone_retraction(self) -> None:
        """It could not be done: the next step is asked for it again."""
        self.steps -= 1

    def misses(self) -> bool:
        self.looks += 1
        return self.miss_every > 0 and self.looks % self.miss_every == 0

    def fails_allocation(self) -> bool:
        self.allocations += 1
        every = self.fail_allocation_every
        return every > 0 and self.allocations % every == 0
