"""Progress: whether scheduler and detokenizer make progress, judged from LoopStamps. PURE.

Owned by the front, which reports stamps and calls `tick` about twice a second; /health reads the
result. Times are seconds of a monotonic clock. Silence counts only while this process runs: after a
stop of its own, the stamps of that time are still in its mailbox.
"""

from ..wire.messages import LoopStamp

TICK_S = 0.5  # how often `tick` is to be called
LONGEST_TICK_S = 1.0  # cap on one tick: in a longer pause this process was stopped
SILENCE_S = 4.0  # four stamps are missing: the process is stopped
NOTHING_DONE_S = 4.0  # the loop does not turn and uses no processor time: it is stuck
WORK_CPU_S = 0.02  # processor time between two stamps that counts as work
SLOWEST_STEP_S, SLOWEST_TOKEN_S = 60.0, 1.0  # a step of N tokens may take the first + N * second


class Progress:
    def __init__(self) -> None:
        self._now: float | None = None
        self._last: LoopStamp | None = None
        # seconds since ...
        self._stamp = 0.0  # ... the scheduler sent anything
        self._relayed = 0.0  # ... the detokenizer sent anything
        self._turned = 0.0  # ... the scheduler's loop began a turn, or was idle
        self._worked = 0.0  # ... that, or the scheduler used the processor

    def tick(self, now: float) -> None:
        """Advance the time. The first call starts the clock."""
        passed = 0.0 if self._now is None else min(now - self._now, LONGEST_TICK_S)
        self._now = now
        self._stamp += passed
        self._relayed += passed
        self._turned += passed
        self._worked += passed

    def relayed(self) -> None:
        """Record a message from the detokenizer, of any kind."""
        self._relayed = 0.0

    def stamped(self, stamp: LoopStamp) -> None:
        """Record a stamp of the scheduler's loop."""
        last, self._last = self._last, stamp
        self._stamp = 0.0
        if last is None or stamp.waiting or stamp.turns != last.turns:
            self._turned = self._worked = 0.0
        elif stamp.cpu_s - last.cpu_s >= WORK_CPU_S:
            self._worked = 0.0

    @property
    def problem(self) -> str | None:
        """Why the server makes no progress; None if it does, or is idle."""
        if self._stamp >= SILENCE_S:
            return f"the scheduler process has not been heard of for {self._stamp:.0f} s"
        if self._relayed >= SILENCE_S:
            return f"the detokenizer process has passed nothing on for {self._relayed:.0f} s"
        if self._worked >= NOTHING_DONE_S:
            return f"the scheduler stands still for {self._worked:.0f} s"
        tokens = 0 if self._last is None else self._last.tokens
        if self._turned >= SLOWEST_STEP_S + tokens * SLOWEST_TOKEN_S:
            return f"the scheduler computes a step of {tokens} tokens for {self._turned:.0f} s"
        return None
