"""Lookahead: how far a step may go past requests that do not fit the pool. PURE.

Made anew for each step by core/waiting_queue.py. Smaller requests may start past ones that do not
fit, so that the pool is used; after a bounded number the room is held for those passed over.
"""

from .req import Req


class Lookahead:
    def __init__(self, max_skips: int, depth: int) -> None:
        self._max_skips = max_skips
        self._left = depth
        self._passed: list[Req] = []  # the head first

    def did_not_fit(self, req: Req, *, urgent: bool) -> bool:
        """Whether others may be tried past this one, which did not fit; never past an urgent."""
        self._passed.append(req)
        return not urgent and self._may_go_on()

    def started(self) -> bool:
        """Whether others may be tried after one has started; counts a skip for all passed over."""
        for req in self._passed:
            req.skips += 1
        return not self._passed or self._may_go_on()

    def _may_go_on(self) -> bool:
        self._left -= 1
        return self._left >= 0 and all(req.skips < self._max_skips for req in self._passed)
