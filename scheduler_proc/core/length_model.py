"""How long answers become, learned from those that have ended. PURE.

A survival curve (Kaplan and Meier's estimate) over log-spaced lengths, forgetting slowly. An answer
that was cut by its limit, or left by its client, says only that it would have become longer than it
was. Fed by core/admission.py at each end; core/reserve.py reads an outlook for each request.
"""

from bisect import bisect_left, bisect_right
from itertools import pairwise

# Steps ahead in which needs are added up. Four times as wide as the one before: as exact as lengths
# are known. The last ends where nobody's answer is expected to go on (reserve.CLIP).
WINDOWS = ((0, 16), (16, 64), (64, 256), (256, 1024), (1024, 4096))

_BORDERS = [0, 1, 2, 3, *((4 + part) << octave for octave in range(16) for part in range(4))]
_MEMORY = 512.0  # answers; one that ended so many ends ago counts about a third
_ENOUGH = 32.0  # answers, before which the curve says too little


class LengthModel:
    def __init__(self) -> None:
        buckets = len(_BORDERS) - 1
        self._ended = [0.0] * buckets  # answers that ended by themselves, by length
        self._seen = [0.0] * buckets  # those, and the ones that were cut
        self._survival: list[float] = []  # chance to become longer than each border
        self._area: list[float] = []  # of the survival, left of each border
        self._outlooks: dict[int, list[tuple[float, float]]] = {}

    @property
    def ready(self) -> bool:
        return sum(self._seen) >= _ENOUGH

    def observe(self, length: int, *, cut: bool) -> None:
        """An answer of `length` >= 1 tokens is over; `cut`: it had not come to its own end."""
        keep = 1.0 - 1.0 / _MEMORY
        self._ended = [count * keep for count in self._ended]
        self._seen = [count * keep for count in self._seen]
        bucket = min(bisect_left(_BORDERS, length), len(_BORDERS) - 1) - 1
        self._seen[bucket] += 1.0
        self._ended[bucket] += not cut
        self._outlooks.clear()

    def outlook(self, generated: int) -> list[tuple[float, float]]:
        """For each window, of an answer that has `generated` tokens and goes on: the chance that it
        lives to see the window, and how many more tokens it then has, in the mean, at its end or at
        the window's, whichever is first.
        """
        bucket = bisect_right(_BORDERS, generated) - 1
        found = self._outlooks.get(bucket)
        if found is None:
            if not self._outlooks:
                self._draw_curve()
            found = self._outlooks[bucket] = [
                self._window(_BORDERS[bucket], first, last) for first, last in WINDOWS
            ]
        return found

    def _window(self, generated: int, first: int, last: int) -> tuple[float, float]:
        now, _ = self._at(generated)
        alive, area = self._at(generated + first)
        _, area_behind = self._at(generated + last)
        return alive / now, first + (area_behind - area) / alive

    def _draw_curve(self) -> None:
        """One answer that never ends is imagined beside those seen, so no chance becomes zero."""
        at_risk = 1.0 + sum(self._seen)
        self._survival, self._area = [1.0], [0.0]
        for bucket, (left, right) in enumerate(pairwise(_BORDERS)):
            alive = self._survival[-1]
            behind = alive * (1.0 - self._ended[bucket] / at_risk)
            self._area.append(self._area[-1] + (right - left) * (alive + behind) / 2)
            self._survival.append(behind)
            at_risk -= self._seen[bucket]

    def _at(self, length: int) -> tuple[float, float]:
        """Survival and its area at `length`; the curve is straight between borders."""
        bucket = bisect_right(_BORDERS, length) - 1
        left, alive, area = _BORDERS[bucket], self._survival[bucket], self._area[bucket]
        if bucket == len(_BORDERS) - 1:
            return alive, area + (length - left) * alive
        slope = (self._survival[bucket + 1] - alive) / (_BORDERS[bucket + 1] - left)
        here = alive + slope * (length - left)
        return here, area + (length - left) * (alive + here) / 2
