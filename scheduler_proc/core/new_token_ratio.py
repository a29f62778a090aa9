"""NewTokenRatio: the share of the answers still to come that admission reserves. PURE.

Requests rarely use all of max_new_tokens. The ratio starts high, decays with every decode step
without a retraction, and jumps up at a retraction (the arithmetic is SGLang's).
"""

from collections.abc import Sequence

from .req import Req

_START, _FLOOR, _DECAY_STEPS = 0.7, 0.14, 600
_LOOKAHEAD = 20  # tokens that every survivor of a retraction must be able to add


class NewTokenRatio:
    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, _START * conservativeness)
        self._floor = self._start * _FLOOR
        self.value = self._start

    def decay(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / _DECAY_STEPS)

    def reset(self) -> None:
        self.value = self._start

    def learn(self, survivors: Sequence[Req]) -> None:
        """Raise the ratio after a retraction to the share of their limits that survivors use."""
        generated = sum(req.output_len + _LOOKAHEAD for req in survivors)
        allowed = sum(req.max_new_tokens for req in survivors) + 1
        self.value = min(1.0, max(self.value, generated / allowed))
