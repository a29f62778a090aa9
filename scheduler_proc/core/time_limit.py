"""Deadlines of requests that all have the same limit: so they end in the order they began. PURE.

Used by core/queue_limits.py.
"""

from collections import OrderedDict


class TimeLimit:
    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._deadlines: OrderedDict[int, float] = OrderedDict()  # the next one first

    def begin(self, rid: int, now: float) -> None:
        if self.seconds is not None:
            self._deadlines[rid] = now + self.seconds

    def clear(self, rid: int) -> None:
        """Does nothing for one that has no deadline, or no more."""
        self._deadlines.pop(rid, None)

    def take_expired(self, now: float) -> list[int]:
        expired = []
        while self._deadlines:
            rid, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                break
            del self._deadlines[rid]
            expired.append(rid)
        return expired
