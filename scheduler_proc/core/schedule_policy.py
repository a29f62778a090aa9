"""The waiting queue, first come first served: by arrival, which a retracted request keeps. PURE."""

import bisect
from collections.abc import Iterator

from .req import Req


def _arrival(req: Req) -> int:
    return req.arrival


class WaitingQueue:
    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        bisect.insort(self._reqs, req, key=_arrival)

    def remove(self, req: Req) -> None:
        index = bisect.bisect_left(self._reqs, req.arrival, key=_arrival)
        assert self._reqs[index] is req
        del self._reqs[index]

    def head(self) -> Req | None:
        return self._reqs[0] if self._reqs else None
