"""Workloads as values: which prompts, how long the answers, and when each request is sent.

Seeded and free of clocks and I/O: the same arguments give the same requests everywhere. `load` runs
them. Token ids come from an alphabet that the caller chooses.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Without a tokenizer: past the special and single-byte tokens, inside every usual vocabulary.
DEFAULT_ALPHABET = range(1000, 30000)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session; its prompt is the whole history, answers included, then `tokens`.

    `stand_in` replaces the answer in later prompts if its ids are not known.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stand_in: tuple[int, ...] = ()


Session = tuple[Turn, ...]  # each turn is sent once the one before is answered


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: a new session starts as soon as one of `in_flight` has ended."""

    in_flight: int


@dataclass(frozen=True, slots=True)
class Open:
    """Open loop: session i starts `times[i]` seconds after the start of the run."""

    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """Sessions of one kind; a background stream is stopped when all others have ended."""

    label: str
    sessions: tuple[Session, ...]
    pace: Closed | Open
    background: bool = False


Workload = tuple[Stream, ...]  # run concurrently


@dataclass(frozen=True, slots=True)
class Source:
    """Seeded source of prompt tokens."""

    seed: int | str
    alphabet: Sequence[int] = DEFAULT_ALPHABET

    def rng(self, purpose: str) -> random.Random:
        """Return a generator per purpose, so that one choice does not shift another's draws."""
        return random.Random(f"{self.seed}/{purpose}")

    def tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(self.alphabet, k=count))


@dataclass(frozen=True, slots=True)
class Shape:
    """Input and output tokens per request; `spread` 0.5 draws both from 0.5 to 1.5 times."""

    prompt: int
    answer: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._vary(rng, self.prompt), self._vary(rng, self.answer)

    def _vary(self, rng: random.Random, length: int) -> int:
        low = max(1, round(length * (1 - self.spread)))
        return rng.randint(low, max(low, round(length * (1 + self.spread))))


def poisson(source: Source, rate: float, count: int) -> Open:
    """Poisson arrivals, `rate` per second: exponential gaps, the first at 0."""
    rng = source.rng("arrivals")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return Open(tuple(times[:count]))


def even(seconds: float, count: int, start: float = 0.0) -> Open:
    return Open(tuple(start + seconds * index for index in range(count)))


def independent(
    source: Source, count: int, shape: Shape, name: str = "independent"
) -> tuple[Session, ...]:
    """Single requests without common prefixes, also across different `name`s."""
    rng = source.rng(name)
    return tuple((_turn(source, rng, shape),) for _ in range(count))


def shared_prefix(
    source: Source, count: int, shape: Shape, *, prefix: int, groups: int
) -> tuple[Session, ...]:
    """Requests of `groups` in turn, each with its group's `prefix` tokens in front."""
    rng = source.rng("shared-prefix")
    fronts = [source.tokens(rng, prefix) for _ in range(groups)]
    sessions = []
    for index in range(count):
        turn = _turn(source, rng, shape)
        sessions.append((Turn(fronts[index % groups] + turn.tokens, turn.max_tokens),))
    return tuple(sessions)


def chats(source: Source, count: int, shape: Shape, *, turns: int) -> tuple[Session, ...]:
    """Conversations of `turns` turns, each of `shape`."""
    rng = source.rng("chats")
    return tuple(tuple(_said(source, rng, shape) for _ in range(turns)) for _ in range(count))


def long_prompts(
    source: Source, decode: Stream, arrivals: Open, shape: Shape, label: str = "long"
) -> Workload:
    """Long prompts that arrive while `decode` runs in the background."""
    long = independent(source, len(arrivals.times), shape, name="long-prompts")
    steady = Stream(decode.label, decode.sessions, decode.pace, background=True)
    return (steady, Stream(label, long, arrivals))


def _turn(source: Source, rng: random.Random, shape: Shape) -> Turn:
    prompt, answer = shape.draw(rng)
    return Turn(source.tokens(rng, prompt), answer)


def _said(source: Source, rng: random.Random, shape: Shape) -> Turn:
    turn = _turn(source, rng, shape)
    return replace(turn, stand_in=source.tokens(rng, turn.max_tokens))
