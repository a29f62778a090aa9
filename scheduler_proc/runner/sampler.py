"""Sampler: the sampling state of each row, and the next token of every sampling row.

Owned by the model runner. It keeps per row its RowOpen and what was sampled since; formulas and
their order are in kernels/sampling.py. A row's token does not depend on its batch-mates.
"""

import math
from dataclasses import dataclass

import torch

from ...kernels.sampling import FAILED, Draw, choose, penalise
from ...wire.sampling import SamplingParams
from ..worker_batch import RowOpen


@dataclass(slots=True, frozen=True)
class _History:
    """The ids that occurred in a row, kept only for rows with penalties."""

    output_counts: torch.Tensor  # [vocab] float32
    seen: torch.Tensor  # [vocab] bool: prompt or output

    def append(self, token_id: int) -> None:
        self.output_counts[token_id] += 1
        self.seen[token_id] = True


@dataclass(slots=True, eq=False)
class _RowState:
    sampling: SamplingParams
    generated: int
    banned: torch.Tensor | None  # [N] int64
    bias: tuple[torch.Tensor, torch.Tensor] | None  # ids [N] int64, values [N] float32
    history: _History | None

    @property
    def bans(self) -> bool:
        return self.banned is not None and self.generated < self.sampling.min_new_tokens

    @property
    def draw(self) -> Draw | None:
        """How to draw the next token; None: take the likeliest."""
        sampling = self.sampling
        if sampling.greedy or sampling.seed is None:
            return None
        return Draw(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            position=self.generated,
        )

    def append(self, token_id: int) -> None:
        self.generated += 1
        if self.history is not None:
            self.history.append(token_id)


class Sampler:
    """`vocab_size` counts the ids that the tokenizer knows; logits beyond them are ignored."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[_RowState | None] = [None] * num_rows

    def open(self, opened: RowOpen) -> None:
        """Reset the row's state. Raises ValueError for a row that draws without a seed."""
        sampling = opened.sampling
        if sampling.seed is None and not sampling.greedy:
            raise ValueError(f"row {opened.row} was opened without a seed")
        self._rows[opened.row] = _RowState(
            sampling=sampling,
            generated=len(opened.output_ids),
            banned=self._banned(opened.banned_ids),
            bias=_bias(sampling),
            history=self._history(opened) if sampling.penalised else None,
        )

    def sample(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        """The next id of each of `rows`, or FAILED. logits: [len(rows), >= vocab_size] float32."""
        states = [self._state(row) for row in rows]
        adjusted = map(_adjusted, logits[:, : self._vocab_size].unbind(), states)
        next_ids = choose(list(adjusted), [state.draw for state in states])
        for state, next_id in zip(states, next_ids, strict=True):
            if next_id != FAILED:
                state.append(next_id)
        return next_ids

    def _state(self, row: int) -> _RowState:
        state = self._rows[row]
        if state is None:
            raise ValueError(f"row {row} samples but was never opened")
        return state

    def _banned(self, ids: tuple[int, ...]) -> torch.Tensor | None:
        """The banned ids below vocab_size: ids beyond it, as of an end token, are never sampled."""
        known = [token_id for token_id in ids if token_id < self._vocab_size]
        return torch.tensor(known) if known else None

    def _history(self, opened: RowOpen) -> _History:
        output = _counts(opened.output_ids.tolist(), self._vocab_size)
        prompt = _counts(opened.prompt_ids.tolist(), self._vocab_size)
        return _History(output.to(torch.float32), (output + prompt) > 0)


def _adjusted(logits: torch.Tensor, state: _RowState) -> torch.Tensor:
    """Apply penalties, then bias, then bans, each to a copy."""
    sampling = state.sampling
    if state.history is not None:
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        logits = penalise(logits, state.history.output_counts, state.history.seen, penalties)
    if state.bias is not None:
        logits = logits.index_add(0, *state.bias)
    if state.banned is not None and state.bans:
        logits = logits.index_fill(0, state.banned, -math.inf)
    return logits


def _bias(sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias.items(), strict=True)
    return torch.tensor(ids), torch.tensor(values, dtype=torch.float32)


def _counts(ids: list[int], vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
