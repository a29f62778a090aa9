"""Deadlines of requests with one common limit, which expire in the order in which they began. PURE.

Used by core/queue_limits.py.
"""

from collections import OrderedDict


class TimeLimit:
    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._deadlines: OrderedDict[int, float] = OrderedDict()  # by rid, earliest first

    def begin(self, rid: int, now: float) -> None:
        if self.seconds is not None:
            self._deadlines[rid] = now + self.seconds

    def clear(self, rid: int) -> None:
        """Drop the deadline of a request; do nothing if it has none."""
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
