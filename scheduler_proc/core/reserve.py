"""What is kept free for answers still to come, and whether one more request fits beside it. PURE.

Made anew for a step by core/admission.py, in pages, over all that run; core/prefill_adder.py offers
it the waiting ones. A candidate is tested with its cached prefix locked, because locking takes that
prefix out of what eviction could free.
"""

import math
from bisect import bisect_left
from collections.abc import Collection
from typing import Protocol

from .kv_cache import KVCache
from .length_model import BORDERS, LengthModel
from .radix_cache import Match
from .req import Req
from .retraction import is_protected

CLIP = 4096  # an answer is never expected to be longer than this
# Steps ahead in which needs are added up, as fine as lengths are known, as far as answers may go.
STARTS = [0, *(border for border in BORDERS if 16 <= border < CLIP)]  # of the windows


class Reserve(Protocol):
    def take(self, req: Req, match: Match) -> bool:
        """Reserve what a waiting request is expected to need, if there is room for it."""
        ...


def expected_tokens(req: Req, ratio: float) -> int:
    """How long prompt and answer are expected to become, never more than the request allows."""
    if is_protected(req):
        return len(req.ids) + req.tokens_left
    return len(req.ids) + math.ceil(min(req.tokens_left, CLIP) * ratio)


class RatioReserve:
    """A candidate must fit with its whole limit, beside a share of what is left of the others'."""

    def __init__(self, kv: KVCache, running: Collection[Req], ratio: float) -> None:
        self._kv = kv
        self._ratio = ratio
        self._room = kv.reachable_pages - sum(self._growth(req) for req in running)

    def take(self, req: Req, match: Match) -> bool:
        found = match.num_pages - self._kv.locked_by(match)  # its pages that others hold anyway
        if self._kv.pages_for(expected_tokens(req, 1.0)) - found > self._room:
            return False
        self._room -= self._kv.pages_for(expected_tokens(req, self._ratio)) - found
        return True

    def _growth(self, req: Req) -> int:
        assert req.kv is not None
        expected = self._kv.pages_for(expected_tokens(req, self._ratio))
        return max(0, expected - len(req.kv.pages))


class ForecastReserve:
    """The chance that all needs together exceed the pool must stay small in every window ahead.

    A request that lives to see a window is taken to need in it what it has and all that it can add
    by the window's end; one that does not needs nothing. Lives are independent, so the sum is near
    a normal distribution with the summed means and variances; `deviations` of its spread are kept
    free. Pages that several hold are shared evenly between all. The first window begins now, where
    all live: so prompts, which need their pages for sure, fit as well.
    """

    def __init__(
        self, kv: KVCache, running: Collection[Req], lengths: LengthModel, deviations: float
    ) -> None:
        self._kv = kv
        self._lengths = lengths
        self._deviations = deviations
        self._sure = 0.0  # pages that the protected need, whatever happens
        self._limit = 0.0  # pages if all reach their limits
        self._means = [0.0] * len(STARTS)
        self._variances = [0.0] * len(STARTS)
        wanted = sum(kv.pages_for(len(req.ids)) for req in running)
        to_come = wanted - sum(len(req.kv.pages) for req in running if req.kv)
        held = kv.pages.capacity - kv.reachable_pages
        even = (held + to_come) / max(1, wanted)
        self._add([(req, even * kv.pages_for(len(req.ids))) for req in running])

    def take(self, req: Req, match: Match) -> bool:
        own = self._kv.pages_for(len(req.ids)) - match.num_pages + self._kv.locked_by(match)
        before = self._sure, self._limit, self._means.copy(), self._variances.copy()
        self._add([(req, own)])
        if self._fits():
            return True
        self._sure, self._limit, self._means, self._variances = before
        return False

    def _fits(self) -> bool:
        capacity = self._kv.pages.capacity + 1e-6  # sums of shares are inexact
        if self._limit <= capacity:
            return True
        return all(
            self._sure + mean + self._deviations * math.sqrt(variance) <= capacity
            for mean, variance in zip(self._means, self._variances, strict=True)
        )

    def _add(self, reqs: list[tuple[Req, float]]) -> None:
        """Count requests in, each with the pages that it holds for what it has so far.

        Those of one age whose limits lie in one window differ in nothing else, so for all windows
        before that one their number, sum and sum of squares are enough.
        """
        alike: dict[tuple[int, int], list[float]] = {}
        for req, own in reqs:
            limit = own + self._growth(req, req.tokens_left)
            self._limit += limit
            if is_protected(req):
                self._sure += limit
                continue
            left = min(req.tokens_left, CLIP)
            need = own + self._growth(req, left)
            age = self._lengths.age(req.output_len)
            last = bisect_left(STARTS, left) - 1
            self._count_in(last, self._lengths.outlook(age)[last], need, need * need)
            sums = alike.setdefault((age, last), [0.0, 0.0, 0.0])
            sums[0] += 1.0
            sums[1] += own
            sums[2] += own * own
        for (age, last), (count, own, squares) in alike.items():
            outlook = self._lengths.outlook(age)
            for window in range(last):
                growth = STARTS[window + 1] / self._kv.page_size
                need = own + count * growth
                squared = squares + growth * (own + need)
                self._count_in(window, outlook[window], need, squared)

    def _growth(self, req: Req, tokens: int) -> int:
        return self._kv.pages_for(len(req.ids) + tokens) - self._kv.pages_for(len(req.ids))

    def _count_in(self, window: int, alive: float, need: float, squared: float) -> None:
        self._means[window] += alive * need
        self._variances[window] += alive * (1.0 - alive) * squared
