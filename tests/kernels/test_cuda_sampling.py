"""The sampling kernels, interpreted, against kernels/sampling.py: the same ids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch

from tokenloom.kernels.cuda import sampling as kernel
from tokenloom.kernels.cuda.sampling import Needs
from tokenloom.kernels.sampling import FAILED, Draw, choose_reference, penalise

CHUNK = 16
EVERYTHING = Needs(draws=True, filters=True, adjusts=True)


@dataclass(frozen=True)
class Wish:
    """What one row asks for."""

    how: Draw | None = None
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    min_new_tokens: int = 0

    def expected(self, logits: torch.Tensor) -> int:
        counts = torch.bincount(torch.tensor(self.output, dtype=torch.int64), minlength=len(logits))
        seen = counts.bool()
        seen[list(self.prompt)] = True
        logits = penalise(logits.float(), counts.float(), seen, self.penalties)
        for one, value in self.bias.items():
            logits[one] += value
        if len(self.output) < self.min_new_tokens:
            logits[list(self.banned)] = -math.inf
        return choose_reference(logits, self.how)


def draw(
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, position)


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


class Bench:
    """Tables and workspace, filled with what must not matter, for one step of some wishes."""

    def __init__(self, wishes: Sequence[Wish], vocab: int, listed: int = 2 * CHUNK) -> None:
        self.vocab = vocab
        self.num = len(wishes)
        self.work = kernel.workspace(self.num, vocab, torch.device("cpu"), CHUNK, listed)
        for buffer in (self.work.peaks, self.work.scores, self.work.masses, self.work.listed_far):
            buffer.fill_(math.nan)
        for buffer in (self.work.winners, self.work.counts, self.work.cuts, self.work.listed_ids):
            buffer.fill_(1 << 30)
        self.tables = kernel.row_tables(self.num, self.work, edits=8)
        self.histories = [self._history(wish) for wish in wishes]
        for row, wish in enumerate(wishes):
            self._open(row, wish)
        self.next_ids = torch.full((self.num,), -77, dtype=torch.int32)

    def _history(self, wish: Wish) -> torch.Tensor | None:
        if wish.penalties == (1.0, 0.0, 0.0):
            return None
        history = torch.zeros(self.vocab, dtype=torch.int32)
        for one in wish.output:
            history[one] += 2
        history[[*wish.prompt, *wish.output]] |= 1
        return history

    def _open(self, row: int, wish: Wish) -> None:
        floats, ints = kernel.row_columns(
            wish.how,
            self.vocab,
            len(wish.output),
            wish.min_new_tokens,
            wish.penalties,
            self.histories[row],
        )
        self.tables.floats[row] = torch.tensor(floats)
        self.tables.ints[row] = torch.tensor(ints)
        chunks = self.work.peaks.shape[1]
        ids, values, starts = kernel.edit_columns(wish.bias, wish.banned, CHUNK, chunks)
        self.tables.edit_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.tables.edit_values[row, : len(ids)] = torch.tensor(values)
        self.tables.edit_starts[row] = torch.tensor(starts)

    def sample(
        self,
        logits: torch.Tensor,
        needs: Needs = EVERYTHING,
        allowed: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> list[int]:
        step = torch.tensor(range(self.num) if rows is None else rows, dtype=torch.int32)
        kernel.sample(
            logits, step, self.tables, self.work, self.next_ids, self.vocab, needs, allowed
        )
        return self.next_ids.tolist()


def check(logits: torch.Tensor, wishes: Sequence[Wish], vocab: int | None = None) -> list[int]:
    vocab = vocab or logits.shape[1]
    got = Bench(wishes, vocab).sample(logits)
    expected = [
        wish.expected(row[:vocab]) for row, wish in zip(logits, wishes, strict=True)
    ]
    assert got == expected
    return got


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 36},
    {"top_k": 299},
    {"top_p": 1e-9},
    {"top_p": 1e-45},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 8, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("vocab", [1, 16, 37, 300])
def test_greedy_takes_the_largest_and_of_ties_the_lowest_id(vocab: int) -> None:
    logits = random_logits(0, 3, vocab)
    logits[1] = 1.0
    logits[2].round_()
    got = Bench([Wish()] * 3, vocab).sample(logits, Needs())
    assert got == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [37, 64, 300])
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 100.0])
def test_every_filter_alone_and_combined(vocab: int, temperature: float) -> None:
    wishes = [
        Wish(draw(temperature, **filters, seed=seed, position=3 * seed))
        for seed, filters in enumerate(FILTERS)
    ]
    wishes = [replace(w, output=[0] * (w.how.position if w.how else 0)) for w in wishes]
    check(random_logits(vocab, len(wishes), vocab), wishes)
