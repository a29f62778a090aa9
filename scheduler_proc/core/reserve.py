"""What is kept free for answers still to come, and whether one more request fits beside it. PURE.

Made anew for a step by core/admission.py, in pages, over all that run; core/prefill_adder.py offers
it the waiting ones. A candidate is tested with its cached prefix locked, because locking takes that
prefix out of what eviction could free.
"""

import math
from collections.abc import Collection
from typing import Protocol

from .kv_cache import KVCache
from .length_model import WINDOWS, LengthModel
from .radix_cache import Match
from .req import Req
from .retraction import is_protected

CLIP = 4096  # an answer is never expected to be longer than this


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
        found = len(match.pages) - self._kv.locked_by(match)  # its pages that others hold anyway
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

    A request needs its pages and those of its growth while it lives, and nothing after. Needs are
    independent, so their sum is near a normal distribution with the summed means and variances;
    `deviations` of its spread are kept free. Pages that several hold are shared evenly between all.
    """

    def __init__(
        self, kv: KVCache, running: Collection[Req], lengths: LengthModel, deviations: float
    ) -> None:
        self._kv = kv
        self._lengths = lengths
        self._deviations = deviations
        self._total = [(0.0, 0.0, 0.0)] * len(WINDOWS)  # mean, variance, most
        self._room = kv.reachable_pages  # for prompts alone
        wanted = sum(kv.pages_for(len(req.ids)) for req in running)
        to_come = wanted - sum(len(req.kv.pages) for req in running if req.kv)
        held = kv.pages.capacity - kv.reachable_pages
        even = (held + to_come) / wanted if wanted else 1.0
        for req in running:
            self._total = self._with(req, even * kv.pages_for(len(req.ids)))

    def take(self, req: Req, match: Match) -> bool:
        own = self._kv.pages_for(len(req.ids)) - len(match.pages) + self._kv.locked_by(match)
        total = self._with(req, own)
        if own > self._room or not all(self._fits(*window) for window in total):
            return False
        self._room -= own
        self._total = total
        return True

    def _fits(self, mean: float, variance: float, most: float) -> bool:
        likely = mean + self._deviations * math.sqrt(variance)
        return min(likely, most) <= self._kv.pages.capacity + 1e-6  # sums of shares are inexact

    def _with(self, req: Req, own: float) -> list[tuple[float, float, float]]:
        """The totals and one more request, that holds `own` pages for what it has so far."""
        size, left = self._kv.page_size, req.tokens_left
        growth = self._kv.pages_for(len(req.ids) + left) - self._kv.pages_for(len(req.ids))
        if is_protected(req):
            need = own + growth
            return [(mean + need, var, most + need) for mean, var, most in self._total]
        total = []
        outlook = self._lengths.outlook(req.output_len)
        for (first, last), (alive, reach), before in zip(
            WINDOWS, outlook, self._total, strict=True
        ):
            if first >= left:
                total.append(before)
                continue
            least, most = own + min(first / size, growth), own + min(last / size, growth)
            mean = min(most, own + reach / size)
            spread = (most - mean) * (mean - least)  # no distribution between the two has more
            variance = alive * spread + alive * (1.0 - alive) * mean * mean
            total.append((before[0] + alive * mean, before[1] + variance, before[2] + most))
        return total
