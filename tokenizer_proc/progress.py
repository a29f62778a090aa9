"""Whether scheduler and detokenizer still make progress, judged from the scheduler's stamps. PURE.

Owned by the front, which tells it of every stamp and of the time about twice a second; /health asks
it. Times are seconds of one clock that only grows. Silence counts only while this process runs: one
that was stopped itself finds the stamps of that time in its mailbox.
"""

from ..wire.messages import LoopStamp

TICK_S = 0.5  # how often `tick` is to be called
LONGEST_TICK_S = 1.0  # of a longer pause only so much counts: this process stood still
SILENCE_S = 4.0  # four stamps are missing: the process is stopped
NOTHING_DONE_S = 4.0  # the loop does not turn and uses no processor time: it is stuck
WORK_CPU_S = 0.02  # processor time between two stamps that passes for work
SLOWEST_STEP_S, SLOWEST_TOKEN_S = 60.0, 1.0  # a step of N tokens may take the first + N * second


class Progress:
    def __init__(self) -> None:
        self._now: float | None = None
        self._last: LoopStamp | None = None
        # seconds since ...
        self._stamp = 0.0  # ... the scheduler said anything
        self._relayed = 0.0  # ... the detokenizer passed anything on
        self._turned = 0.0  # ... the scheduler's loop began a turn, or slept for want of work
        self._worked = 0.0  # ... that, or the scheduler used the processor

    def tick(self, now: float) -> None:
        """Let time pass. The first call starts the clock."""
        passed = 0.0 if self._now is None else min(now - self._now, LONGEST_TICK_S)
        self._now = now
        self._stamp += passed
        self._relayed += passed
        self._turned += passed
        self._worked += passed

    def relayed(self) -> None:
        """The detokenizer passed a message on, whatever it is."""
        self._relayed = 0.0

    def stamped(self, stamp: LoopStamp) -> None:
        """The scheduler told what its loop is doing."""
        last, self._last = self._last, stamp
        self._stamp = 0.0
        if last is None or stamp.waiting or stamp.turns != last.turns:
            self._turned = self._worked = 0.0
        elif stamp.cpu_s - last.cpu_s >= WORK_CPU_S:
            self._worked = 0.0

    @property
    def problem(self) -> str | None:
        """Why the server cannot be relied on now; None: it makes progress, or has nothing to do."""
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
