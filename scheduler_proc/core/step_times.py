"""StepTimes: predicts the duration of a step from measured steps. PURE.

Owned by core/step_budget.py. Seconds come in as arguments: the same steps with the same seconds
give the same model, so a replay decides as the server did. No clock and no policy enter.
"""

import math
from itertools import combinations

# Seconds per step, per decode and per prompt token before any measurement. Their ratios matter more
# than the seconds: they let a first mixed step compute some hundred prompt tokens.
PRIOR = (10e-3, 0.1e-3, 0.1e-3)
_SHORTEST, _LONGEST = 1e-6, 3600.0  # bounds that a measured time is clamped to, in seconds
# A step's weight falls to 1/e after 32 more steps of its kind, or 512 of the other kinds: after
# many steps of decodes alone the model still knows the cost of a prompt token.
_KEEP_OWN, _KEEP_OTHERS = 1 - 1 / 32, 1 - 1 / 512
_STAY = 0.1  # weight of the last fit (a step's is 1): coefficients without data keep their value
# A result that is read late makes its own step look long and the next one short. Short ones weigh
# most, so after this many steps of a kind a time is raised to at least half of the predicted one.
_TRUSTED = 8
_SUBSETS = [held for size in (3, 2, 1) for held in combinations(range(3), size)]

Vector = list[float]
Matrix = list[Vector]


class StepTimes:
    """seconds = step + decode * decodes + prompt_token * prompt tokens, coefficients >= 0.

    A least-squares fit in which each step has the weight 1 / (measured * predicted), so that an
    outlier (kernels were compiled, another process had the cores) pulls no more than any other step
    and long steps do not dominate short ones.
    """

    def __init__(self) -> None:
        self._of_decodes, self._of_prompts, self._of_both = _Kind(), _Kind(), _Kind()
        self.step, self.decode, self.prompt_token = PRIOR

    def predict(self, decodes: int, prompt_tokens: int) -> float:
        seconds = self.step + decodes * self.decode + prompt_tokens * self.prompt_token
        return max(_SHORTEST, seconds)

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a measured step. Seconds that are not positive and finite are ignored."""
        if not 0 < seconds < math.inf:
            return
        predicted = self.predict(decodes, prompt_tokens)
        kinds = (self._of_decodes, self._of_prompts, self._of_both)
        own = self._of_both
        if not (decodes and prompt_tokens):
            own = self._of_decodes if decodes else self._of_prompts
        seconds = max(_SHORTEST, min(seconds, _LONGEST))
        if own.seen >= _TRUSTED:
            seconds = max(seconds, predicted / 2)
        for kind in kinds:
            kind.fade(_KEEP_OWN if kind is own else _KEEP_OTHERS)
        own.add((1, decodes, prompt_tokens), seconds, 1 / (seconds * predicted))
        self._fit(kinds)

    def _fit(self, kinds: "tuple[_Kind, ...]") -> None:
        last = [self.step, self.decode, self.prompt_token]
        scales = [max(value, prior / 10) for value, prior in zip(last, PRIOR, strict=True)]
        stay = [_STAY / scale**2 for scale in scales]
        left = [[sum(kind.products[i][j] for kind in kinds) for j in range(3)] for i in range(3)]
        right = [sum(kind.sums[i] for kind in kinds) + stay[i] * last[i] for i in range(3)]
        for i in range(3):
            left[i][i] += stay[i]
        self.step, self.decode, self.prompt_token = _non_negative_fit(left, right)


class _Kind:
    """Weighted sums over the steps of one kind: decodes only, prompts only, or both."""

    __slots__ = ("products", "seen", "sums")

    def __init__(self) -> None:
        self.products: Matrix = [[0.0] * 3 for _ in range(3)]  # sum of weight * size * size
        self.seen = 0
        self.sums: Vector = [0.0] * 3  # sum of weight * size * seconds

    def fade(self, share: float) -> None:
        self.sums = [share * value for value in self.sums]
        self.products = [[share * value for value in row] for row in self.products]

    def add(self, sizes: tuple[int, int, int], seconds: float, weight: float) -> None:
        self.seen += 1
        for i in range(3):
            self.sums[i] += weight * sizes[i] * seconds
            for j in range(3):
                self.products[i][j] += weight * sizes[i] * sizes[j]


def _non_negative_fit(left: Matrix, right: Vector) -> Vector:
    """The x >= 0 that minimises x' left x - 2 right' x; `left` is positive definite, `right` >= 0.

    Fits every subset of the coefficients with the others at 0, and returns the best fit in which
    none is negative.
    """
    best, lowest = [0.0] * 3, math.inf
    for held in _SUBSETS:
        x = [0.0] * 3
        for i, value in zip(held, _solve(left, right, held), strict=True):
            x[i] = value
        if min(x) < 0:
            continue
        if len(held) == 3:
            return x
        cost = -sum(right[i] * x[i] for i in held)
        if cost < lowest:
            best, lowest = x, cost
    return best


def _solve(left: Matrix, right: Vector, held: tuple[int, ...]) -> Vector:
    """Solve for the coefficients `held` by elimination; all -1 where rounding prevents it."""
    rows = [[*(left[i][j] for j in held), right[i]] for i in held]
    size = len(held)
    for i in range(size):
        if rows[i][i] <= 0:
            return [-1.0] * size
        for k in range(i + 1, size):
            share = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= share * rows[i][j]
    x = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * x[j] for j in range(i + 1, size))
        x[i] = (rows[i][size] - rest) / rows[i][i]
    return x
