"""Seeded workloads for the simulated scheduler. Used by `policies`.

Rates exceed what the simulated model serves, so that requests wait and their order matters. The
scheduler sees `limit`; the answer's real length is the workload's.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from .simulation.hash_model import EOS, VOCAB, Script, hash_answer

FLOODED = "flood"
STEADY = "steady"
COLD = "cold"


@dataclass(slots=True, eq=False)
class Ask:
    """One request; `at` is its arrival, or for a later turn the pause after the turn before it."""

    at: float
    prompt: list[int]
    answer: int
    limit: int
    tenant: str = ""
    then: "Ask | None" = None

    @property
    def script(self) -> Script:
        return Script(ends_at=len(self.prompt) + self.answer)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def _poisson(rng: random.Random, rate: float, count: int) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        yield now


def uniform(scale: float = 1.0) -> list[Ask]:
    """Nothing in common: prompts of 64 to 512 tokens, answers of 16 to 128."""
    rng = random.Random("uniform")
    return [
        Ask(at, _ids(rng, rng.randint(64, 512)), rng.randint(16, 128), 256)
        for at in _poisson(rng, 10.0, int(500 * scale))
    ]


def zipf(scale: float = 1.0) -> list[Ask]:
    """One of 64 prefixes of 512 tokens, the n-th with weight 1/n, and a short tail."""
    rng = random.Random("zipf")
    prefixes = [_ids(rng, 512) for _ in range(64)]
    weights = [1.0 / (1 + rank) for rank in range(64)]
    return [
        Ask(
            at,
            rng.choices(prefixes, weights)[0] + _ids(rng, rng.randint(16, 96)),
            rng.randint(16, 64),
            256,
        )
        for at in _poisson(rng, 16.0, int(800 * scale))
    ]


def multi_turn(scale: float = 1.0) -> list[Ask]:
    """Chats of six turns, each with the whole history, a few seconds after the last answer."""
    rng = random.Random("multi-turn")
    return [_chat(rng, at) for at in _poisson(rng, 4.0, int(150 * scale))]


def _chat(rng: random.Random, at: float) -> Ask:
    first = turn = Ask(at, _ids(rng, rng.randint(64, 256)), rng.randint(32, 96), 256)
    for _ in range(5):
        said = hash_answer(turn.prompt, turn.answer - 1, frozenset({EOS}), turn.script)
        prompt = turn.prompt + said + _ids(rng, rng.randint(32, 128))
        turn.then = Ask(rng.uniform(2.0, 8.0), prompt, rng.randint(32, 96), 256)
        turn = turn.then
    return first


def long_prompts(scale: float = 1.0) -> list[Ask]:
    """Short questions with long answers, and occasional prompts of thousands of tokens."""
    rng = random.Random("long")
    seconds = 60 * scale
    short = [
        Ask(at, _ids(rng, 48), rng.randint(100, 200), 512)
        for at in _poisson(rng, 5.0, int(5.0 * seconds))
    ]
    long = [
        Ask(at, _ids(rng, rng.randint(1500, 3000)), 32, 64)
        for at in _poisson(rng, 0.7, int(0.7 * seconds))
    ]
    return sorted(short + long, key=lambda ask: ask.at)


def starvation(scale: float = 1.0) -> list[Ask]:
    """A stream with one shared prefix, above capacity, and ten requests that share nothing."""
    rng = random.Random("starvation")
    prefix = _ids(rng, 512)
    hot = [
        Ask(at, prefix + _ids(rng, 32), rng.randint(16, 32), 64)
        for at in _poisson(rng, 40.0, int(2000 * scale))
    ]
    cold = [Ask(2.0 + n / 2, _ids(rng, 300), 24, 64, COLD) for n in range(10)]
    return sorted(hot + cold, key=lambda ask: ask.at)


def flood(scale: float = 1.0) -> list[Ask]:
    """One tenant sends twice the capacity, another one request each second."""
    rng = random.Random("flood")
    seconds = 40 * scale
    return sorted(
        [
            Ask(at, _ids(rng, 200), rng.randint(30, 70), 128, FLOODED)
            for at in _poisson(rng, 20.0, int(20 * seconds))
        ]
        + alone(scale),
        key=lambda ask: ask.at,
    )


def alone(scale: float = 1.0) -> list[Ask]:
    """The small tenant of `flood` without the flood."""
    rng = random.Random("alone")
    return [
        Ask(1.0 + n, _ids(rng, 200), rng.randint(30, 70), 128, STEADY)
        for n in range(int(40 * scale))
    ]


def answers_far_below_their_limits(scale: float = 1.0) -> list[Ask]:
    """1024 tokens allowed, about 100 taken."""
    rng = random.Random("below")
    return [
        Ask(at, _ids(rng, rng.randint(32, 256)), _about(rng, 100), 1024)
        for at in _poisson(rng, 16.0, int(600 * scale))
    ]


def answers_at_their_limits(scale: float = 1.0) -> list[Ask]:
    """Answers of 64 to 512 tokens that all reach their limit."""
    rng = random.Random("at")
    asks = []
    for at in _poisson(rng, 8.0, int(300 * scale)):
        limit = rng.randint(64, 512)
        asks.append(Ask(at, _ids(rng, rng.randint(32, 256)), limit + 1, limit))
    return asks


def answers_of_two_kinds(scale: float = 1.0) -> list[Ask]:
    """1024 tokens allowed; four of five take about 30, the fifth about 500."""
    rng = random.Random("two")
    return [
        Ask(
            at,
            _ids(rng, rng.randint(32, 256)),
            _about(rng, 500 if rng.random() < 0.2 else 30),
            1024,
        )
        for at in _poisson(rng, 16.0, int(500 * scale))
    ]


def at_once(count: int, prompt: int, answer: int, scale: float = 1.0) -> list[Ask]:
    """Equal requests that share nothing and arrive at the same moment."""
    rng = random.Random("at once")
    return [Ask(0.0, _ids(rng, prompt), answer, answer) for _ in range(math.ceil(count * scale))]


def _about(rng: random.Random, middle: int) -> int:
    """Log-normal: two of three within a factor of 1.6, none above 1000."""
    return max(1, min(1000, round(middle * math.exp(rng.gauss(0.0, 0.5)))))


POLICY_WORKLOADS: dict[str, Callable[[float], list[Ask]]] = {
    "uniform": uniform,
    "Zipf prefixes": zipf,
    "multi-turn": multi_turn,
    "long prompts": long_prompts,
}
ADMISSION_WORKLOADS: dict[str, Callable[[float], list[Ask]]] = {
    "far below": answers_far_below_their_limits,
    "at the limit": answers_at_their_limits,
    "two kinds": answers_of_two_kinds,
}
BUDGET_WORKLOADS: dict[str, Callable[[float], list[Ask]]] = {
    "200 of 512, answers of 128": partial(at_once, 200, 512, 128),
    "200 of 60, answers of 150": partial(at_once, 200, 60, 150),
    "300 of 200, answers of 64": partial(at_once, 300, 200, 64),
}
