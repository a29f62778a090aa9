"""DeviceSampler: the sampler of a CUDA device, with the rows' state on the device.

Owned by the device runner, which is imported only for a CUDA device: it needs triton. It keeps what
Sampler keeps, and gives the same ids; formulas and their order are in kernels/sampling.py. Nothing
here waits for the device. `sample` can be captured in a graph: its buffers are static, and what it
launches depends only on `Needs` and shapes.

All calls use one stream, so that a row is opened after the steps of its former request.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.cuda import sampling as kernel
from ...kernels.cuda.sampling import LADDER, Needs
from ...kernels.sampling import Draw
from ...wire.limits import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from ...wire.sampling import SamplingParams
from ..worker_batch import RowOpen

# Most edits of a row: its biases, its stop ids, and the model's own end tokens.
MAX_EDITS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 84


@dataclass(slots=True, frozen=True)
class _RowState:
    """The contents of the device's tables for one opened row."""

    row: int
    level: int  # index in LADDER
    floats: list[float]
    ints: list[int]
    ids: list[int]  # of edits
    values: list[float]  # of edits
    starts: list[int]  # index of each chunk's first edit
    history: tuple[NDArray[np.int64], NDArray[np.int32]] | None  # ids and their history words


class DeviceSampler:
    """`vocab_size` counts the ids that the tokenizer knows; logits beyond them are ignored.

    A step has at most `num_rows` rows, padding included. `last_tokens` [num_rows] int32, on the
    device: the last id sampled by each row, the input of its next decode. `chunk` and `listed` are
    kernel sizes, smaller in tests with small vocabularies.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        chunk: int = kernel.CHUNK,
        listed: int = kernel.LISTED,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._work = kernel.workspace(num_rows, vocab_size, device, chunk, listed)
        self._spare_row = num_rows  # opened by warm_up, never sampled
        self._tables = kernel.row_tables(num_rows + 1, self._work, MAX_EDITS)
        self._next_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._levels: list[int | None] = [None] * (num_rows + 1)  # index in LADDER by row
        self._edited = [False] * (num_rows + 1)
        # Allocated for all rows at once, before the free memory is measured for the KV pool.
        self._histories = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.last_tokens = self._tables.last_tokens[:num_rows]

    def open(self, opened: Sequence[RowOpen]) -> None:
        """Reset the state of rows, with one copy to the device for all of them.

        Of two RowOpens of one row the later wins. Raises ValueError for a row that draws without a
        seed or has too many edits, and then changes nothing.
        """
        states = [self._state(one) for one in {one.row: one for one in opened}.values()]
        if not states:
            return
        for state in states:
            self._levels[state.row] = state.level
        edited = [state for state in states if state.ids or self._edited[state.row]]
        for state in states:
            self._edited[state.row] = bool(state.ids)
        rows = np.array([state.row for state in states], dtype=np.int32)
        penalised = [state for state in states if state.history is not None]
        columns = self._columns(states, edited, penalised)
        parts = self._brought([rows, *columns])
        places = parts[0].long()
        tables, history = self._tables, self._histories
        tables.ints.index_copy_(0, places, parts[1].view(torch.int64).view(len(rows), -1))
        tables.floats.index_copy_(0, places, parts[2].view(torch.float32).view(len(rows), -1))
        if edited:
            starts = parts[4].view(len(edited), -1)
            tables.edit_starts.index_copy_(0, parts[3].long(), starts)
            edits = parts[5].long()
            tables.edit_ids.view(-1).index_copy_(0, edits, parts[6])
            tables.edit_values.view(-1).index_copy_(0, edits, parts[7].view(torch.float32))
        if penalised:
            history.index_fill_(0, parts[8].long(), 0)
            history.view(-1).index_copy_(0, parts[9].view(torch.int64), parts[10])

    def _columns(
        self, states: list[_RowState], edited: list[_RowState], penalised: list[_RowState]
    ) -> list[NDArray[Any]]:
        """The arrays that `open` copies: of all rows, of the edited and of the penalised ones."""
        room = self._tables.edit_ids.shape[1]
        histories = [state.history for state in penalised if state.history is not None]
        return [
            np.array([state.ints for state in states], dtype=np.int64),
            np.array([state.floats for state in states], dtype=np.float32),
            np.array([state.row for state in edited], dtype=np.int32),
            np.array([state.starts for state in edited], dtype=np.int32),
            np.array(
                [state.row * room + at for state in edited for at in range(len(state.ids))],
                dtype=np.int32,
            ),
            np.array([one for state in edited for one in state.ids], dtype=np.int32),
            np.array([one for state in edited for one in state.values], dtype=np.float32),
            np.array([state.row for state in penalised], dtype=np.int32),
            np.concatenate(
                [
                    np.zeros(0, dtype=np.int64),
                    *(
                        state.row * self._vocab_size + ids
                        for state, (ids, _) in zip(penalised, histories, strict=True)
                    ),
                ]
            ),
            np.concatenate([np.zeros(0, dtype=np.int32), *(counts for _, counts in histories)]),
        ]

    def _state(self, opened: RowOpen) -> _RowState:
        """Compute the table contents of a row, on the host."""
        row, sampling = opened.row, opened.sampling
        how = self._draw(opened)
        generated = len(opened.output_ids)
        bias = sampling.logit_bias or {}
        banned = [
            token_id
            for token_id in opened.banned_ids
            if token_id < self._vocab_size and generated < sampling.min_new_tokens
        ]
        if len(bias) + len(banned) > MAX_EDITS:
            raise ValueError(
                f"row {row} has {len(bias)} biases and {len(banned)} bans, over {MAX_EDITS}"
            )
        history = self._history(opened) if sampling.penalised else None
        chunks = self._work.peaks.shape[1]
        ids, values, starts = kernel.edit_columns(bias, banned, self._work.chunk, chunks)
        floats, ints = kernel.row_columns(
            how,
            self._vocab_size,
            generated,
            sampling.min_new_tokens,
            (
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            ),
            None if history is None else self._histories[row],
        )
        filters = how is not None and (0 < how.top_k < self._vocab_size or how.top_p < 1.0)
        needs = Needs(how is not None, filters, bool(history is not None or bias or banned))
        level = next(level for level, one in enumerate(LADDER) if one.covers(needs))
        return _RowState(row, level, floats, ints, ids, values, starts, history)

    def needs(self, rows: Sequence[int]) -> Needs:
        """The Needs that cover a step of these rows. Raises ValueError for an unopened row."""
        highest = 0
        for row in rows:
            level = self._levels[row]
            if level is None:
                raise ValueError(f"row {row} samples but was never opened")
            highest = max(highest, level)
        return LADDER[highest]

    def warm_up(self, width: int) -> None:
        """Run everything that `open` and `sample` launch, so that no request waits for a compile.

        Kernels are compiled for float32 logits of `width` columns.
        """
        everything = SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={0: 1.0})
        self.open([RowOpen(self._spare_row, everything, array("i", [0]), array("i"), ())])
        logits = torch.empty(1, width, dtype=torch.float32, device=self._device)
        padding = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        for needs in LADDER:
            self.sample(logits, padding, needs)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        needs: Needs,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Choose the next ids [S] int32 of `rows` [S] int32, on the device; FAILED (-1) if none.

        logits: [S, >= vocab_size], float32 or 16 bit. A row of -1 is padding: its id is undefined
        and no state changes. `needs` must cover every row of the step. `allowed` is a grammar's
        mask, by row. The returned buffer is overwritten by the next call.
        """
        next_ids = self._next_ids[: rows.shape[0]]
        kernel.sample(
            logits, rows, self._tables, self._work, next_ids, self._vocab_size, needs, allowed
        )
        return next_ids

    def _draw(self, opened: RowOpen) -> Draw | None:
        sampling = opened.sampling
        if sampling.greedy:
            return None
        if sampling.seed is None:
            raise ValueError(f"row {opened.row} was opened without a seed")
        return Draw(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            position=len(opened.output_ids),
        )

    def _history(self, opened: RowOpen) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The ids that occurred, and the history word of each (kernels/cuda/sampling.py)."""
        output = np.array(opened.output_ids, dtype=np.int64)
        occurred = np.concatenate([np.array(opened.prompt_ids, dtype=np.int64), output])
        ids = np.unique(occurred[occurred < self._vocab_size])
        generated = np.bincount(output, minlength=self._vocab_size)[ids]
        return ids, (2 * generated + 1).astype(np.int32)

    def _brought(self, columns: list[NDArray[Any]]) -> list[torch.Tensor]:
        """Copy the bytes of all columns to the device in one copy; return each as [n] int32.

        From pinned memory the copy does not block, and torch keeps that memory until it is read.
        Each column begins at a multiple of 8 bytes, so that it can be viewed as int64.
        """
        words = [column.reshape(-1).view(np.int32) for column in columns]
        begins = list(accumulate((len(one) + len(one) % 2 for one in words), initial=0))
        staged = torch.empty(begins[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for begin, one in zip(begins, words, strict=False):
            staged.numpy()[begin : begin + len(one)] = one
        there = staged.to(self._device, non_blocking=True)
        return [there[begin : begin + len(one)] for begin, one in zip(begins, words, strict=False)]
