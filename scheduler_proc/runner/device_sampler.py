"""The sampler of a CUDA device: the rows' state lies there, and a token is chosen without the host.

Owned by the model runner, which imports it only where there is such a device: it needs triton.
It keeps what Sampler keeps, and gives the same ids; formulas and their order are in
kernels/sampling.py. Nothing here waits for the device. `sample` can be captured in a graph: it
works in buffers that stay, and what it launches depends on `Needs` and shapes alone.

All calls belong on one stream: a row is opened after the steps of its former request.
"""

from collections.abc import Sequence

import torch

from ...kernels.cuda import sampling as kernel
from ...kernels.cuda.sampling import LADDER, Needs
from ...kernels.sampling import Draw
from ...wire.limits import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from ..worker_batch import RowOpen

# Of a row: its bias, its stop ids, and the model's own end tokens.
MAX_EDITS = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + 84


class DeviceSampler:
    """`vocab_size` counts the ids that the tokenizer knows; logits beyond them are never seen.

    A step has at most `num_rows` rows, with its padding.
    `last_tokens` [num_rows] int32, on the device: what each row sampled last, the input of its next
    decode. `chunk` and `listed` are the kernels' (small vocabularies in tests want small ones).
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
        self._tables = kernel.row_tables(num_rows, self._work, MAX_EDITS)
        self._next_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._levels: list[int | None] = [None] * num_rows  # in the ladder of needs
        self._edited = [False] * num_rows
        # The tables know addresses; what lies there lives as long as the row is not opened again.
        self._histories: list[torch.Tensor | None] = [None] * num_rows
        self.last_tokens = self._tables.last_tokens

    def open(self, opened: RowOpen) -> None:
        """Start the row's state anew. A row that draws must carry a seed: ValueError."""
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
            history,
        )
        self._put(self._tables.floats[row], floats)
        self._put(self._tables.ints[row], ints)
        self._put_edits(row, bias, banned)
        self._histories[row] = history
        filters = how is not None and (0 < how.top_k < self._vocab_size or how.top_p < 1.0)
        needs = Needs(how is not None, filters, bool(history is not None or bias or banned))
        self._levels[row] = next(level for level, one in enumerate(LADDER) if one.covers(needs))

    def needs(self, rows: Sequence[int]) -> Needs:
        """What covers a step of these rows. ValueError for one that was never opened."""
        highest = 0
        for row in rows:
            level = self._levels[row]
            if level is None:
                raise ValueError(f"row {row} samples but was never opened")
            highest = max(highest, level)
        return LADDER[highest]

    def warm_up(self, width: int) -> None:
        """Have all kernels compiled for float32 logits of `width` columns."""
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
        """The next ids [S] int32 of `rows` [S] int32 on the device, FAILED (-1) among them.

        logits: [S, >= vocab_size], float32 or 16 bit. A row of -1 pads: its id means nothing and
        nothing is noted of it. `needs` must cover every row of the step. `allowed` is a grammar's
        mask, by row. The ids lie in a buffer that the next call writes again.
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

    def _history(self, opened: RowOpen) -> torch.Tensor:
        """[vocab_size] int32 on the device, as kernel.row_columns describes it."""
        history = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        for ids, value in ((opened.prompt_ids, 0), (opened.output_ids, 2)):
            if ids:
                staged = self._staged(torch.tensor(ids.tolist(), dtype=torch.int64))
                there = staged.to(self._device, non_blocking=True)
                history.index_add_(0, there, torch.full_like(there, value, dtype=torch.int32))
                history.index_copy_(0, there, history[there] | 1)
        return history

    def _put_edits(self, row: int, bias: dict[int, float], banned: Sequence[int]) -> None:
        """Rows of which most have none: a row without edits is written only if it had some."""
        edited = bool(bias or banned)
        if edited or self._edited[row]:
            chunks = self._work.peaks.shape[1]
            ids, values, starts = kernel.edit_columns(bias, banned, self._work.chunk, chunks)
            if ids:
                self._put(self._tables.edit_ids[row, : len(ids)], ids)
                self._put(self._tables.edit_values[row, : len(ids)], values)
            self._put(self._tables.edit_starts[row], starts)
        self._edited[row] = edited

    def _put(self, target: torch.Tensor, values: Sequence[float]) -> None:
        staged = self._staged(torch.tensor(values, dtype=target.dtype))
        target.copy_(staged, non_blocking=True)

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        """Pinned: from there a copy does not wait, and torch keeps the memory until it is read."""
        return values.pin_memory() if self._device.type == "cuda" else values
