"""How long answers become, learned from those that have ended. PURE.

A survival curve (Kaplan and Meier's estimate) over log-spaced lengths, forgetting slowly. An answer
that was cut by its limit, or left by its client, says only that it would have become longer than it
was. Fed by core/admission.py at each end; read by core/reserve.py.
"""

from bisect import bisect_left, bisect_right

# Four to an octave, beyond any context: lengths are known to a fifth.
BORDERS = [0, 1, 2, 3, *((4 + part) << octave for octave in range(16) for part in range(4))]
_MEMORY = 512.0  # answers; one that ended so many ends ago counts about a third
_ENOUGH = 32.0  # answers, before which the curve says too little


class LengthModel:
    def __init__(self, moments: list[int]) -> None:
        """`moments`: the steps ahead that outlooks speak of."""
        self._moments = moments
        self._ended = [0.0] * (len(BORDERS) - 1)  # answers that ended by themselves, by length
        self._seen = [0.0] * (len(BORDERS) - 1)  # those, and the ones that were cut
        self._survival: list[float] = []  # chance to become longer than each border
        self._outlooks: dict[int, list[float]] = {}

    @property
    def ready(self) -> bool:
        return sum(self._seen) >= _ENOUGH

    def observe(self, length: int, *, cut: bool) -> None:
        """An answer of `length` >= 1 tokens is over; `cut`: it had not come to its own end."""
        keep = 1.0 - 1.0 / _MEMORY
        self._ended = [count * keep for count in self._ended]
        self._seen = [count * keep for count in self._seen]
        bucket = min(bisect_left(BORDERS, length), len(BORDERS) - 1) - 1
        self._seen[bucket] += 1.0
        self._ended[bucket] += not cut
        self._outlooks.clear()

    @staticmethod
    def age(generated: int) -> int:
        """Answers of one age have one outlook."""
        return bisect_right(BORDERS, generated) - 1

    def outlook(self, age: int) -> list[float]:
        """Of an answer that goes on at this age: its chance to live longer than each moment."""
        found = self._outlooks.get(age)
        if found is None:
            if not self._outlooks:
                self._draw_curve()
            now = self._survival[age]
            found = [self._alive(BORDERS[age] + moment) / now for moment in self._moments]
            self._outlooks[age] = found
        return found

    def _draw_curve(self) -> None:
        """One answer that never ends is imagined beside those seen, so no chance becomes zero."""
        at_risk = 1.0 + sum(self._seen)
        alive = 1.0
        self._survival = [alive]
        for seen, ended in zip(self._seen, self._ended, strict=True):
            alive *= 1.0 - ended / at_risk
            at_risk -= seen
            self._survival.append(alive)

    def _alive(self, length: int) -> float:
        """The curve is straight between borders and level behind the last."""
        bucket = bisect_right(BORDERS, length) - 1
        alive = self._survival[bucket]
        if bucket == len(BORDERS) - 1:
            return alive
        share = (length - BORDERS[bucket]) / (BORDERS[bucket + 1] - BORDERS[bucket])
        return alive + share * (self._survival[bucket + 1] - alive)
