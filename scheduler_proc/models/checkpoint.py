"""What a loader needs of a model's files, whatever their format, and the checks that hold for all.

A Checkpoint reads rows of one tensor at a time, so no tensor has to be in memory as a whole: a
loader holds the file's pages, what it has built and a few pieces. The formats are in
weights.py (safetensors), gguf_weights.py (GGUF) and dummy_weights.py (made up).
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from ...kernels.quantised_linear import BLOCK_ROWS, StreamedRows
from ...model_files.errors import ModelError
from .llama import LlamaForCausalLM

Index = tuple[slice, ...]  # rows, and columns for a tensor of two dimensions
Progress = Callable[[int], object]  # called with the number of weights that were read

_PIECE_ELEMENTS = 1 << 19  # 2 MB in float32: read at a time
_READ_AHEAD = 4  # pieces that threads prepare while one is used


class Checkpoint(Protocol):
    """The tensors of a model's files, by the names of a Hugging Face checkpoint."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> list[int]: ...

    def read(self, name: str, index: Index) -> torch.Tensor:
        """The part of a tensor at `index`, in floats. Called from several threads.

        The rows are whole heads where the tensor has heads.
        """
        ...

    def blocks(self, name: str) -> StreamedRows | None:
        """The quantised rows as the file holds them, if the native formats hold them exactly."""
        ...


def check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """Raise ModelError if the files hold an unknown tensor, or lack one that the model needs."""
    unknown = [name for name in found if name not in wanted]
    if unknown:
        raise ModelError(f"the model files hold tensors that are not used: {some_names(unknown)}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"the model files lack tensors: {some_names(missing)}")


def check_tensors(wanted: Mapping[str, Sequence[int]], found: Checkpoint) -> None:
    """Compare names and shapes in the files with those that the config asks for.

    Raises ModelError for missing, unknown or misshapen tensors.
    """
    check_names(found.names, wanted)
    for name, shape in wanted.items():
        if found.shape(name) != list(shape):
            raise ModelError(
                f"{name} has shape {found.shape(name)}, the config asks for {list(shape)}"
            )


def fill_model(model: LlamaForCausalLM, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy each tensor, or this rank's part of it, into its slot. The shapes have been checked."""

    def fill(name: str) -> int:
        slot, cut = model.weight_slots[name], model.cuts.get(name)
        for rows in row_slices(slot.shape, model.spec.head_dim):
            index = (rows, *(slice(0, size) for size in slot.shape[1:]))
            slot[rows].copy_(checkpoint.read(name, cut.shift(index) if cut else index))
        return slot.numel()

    with ThreadPoolExecutor(min(_READ_AHEAD, torch.get_num_threads())) as threads:
        for count in threads.map(fill, checkpoint.names):
            progress(count)


class RowReader:
    """Reads rows of matrices as float32 with a few threads, ahead of their use.

    Its buffers are used again for every piece: with new ones the allocator's slack alone was a
    hundred megabytes.
    """

    def __init__(self, checkpoint: Checkpoint, head_dim: int) -> None:
        self._checkpoint = checkpoint
        self._head_dim = head_dim
        self._threads = ThreadPoolExecutor(min(_READ_AHEAD, torch.get_num_threads()))
        # One more is in the hands of the caller, and one waits to be.
        self._buffers = [torch.empty(0)] * (_READ_AHEAD + 2)

    def rows(self, name: str) -> StreamedRows:
        """The rows of a matrix; a piece is good until the next one is asked for."""
        n, k = self._checkpoint.shape(name)
        return StreamedRows(self._pieces(name, n, k), n, k)

    def close(self) -> None:
        self._threads.shutdown()

    def _pieces(self, name: str, n: int, k: int) -> Iterator[torch.Tensor]:
        pending: deque[Future[torch.Tensor]] = deque()
        for number, rows in enumerate(row_slices((n, k), self._head_dim)):
            pending.append(self._threads.submit(self._read, name, rows, k, number))
            if len(pending) > _READ_AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _read(self, name: str, rows: slice, k: int, number: int) -> torch.Tensor:
        place, size = number % len(self._buffers), (rows.stop - rows.start) * k
        if self._buffers[place].numel() < size:
            self._buffers[place] = torch.empty(size)
        piece = self._buffers[place][:size].view(-1, k)
        return piece.copy_(self._checkpoint.read(name, (rows, slice(0, k))))


def row_slices(shape: Sequence[int], head_dim: int) -> Iterator[slice]:
    """Slices that cover the rows of `shape` in pieces of whole heads and whole packed blocks."""
    unit = math.lcm(BLOCK_ROWS, head_dim)
    step = max(1, _PIECE_ELEMENTS // math.prod(shape[1:]) // unit) * unit
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def some_names(names: Collection[str]) -> str:
    """The first names of a list that may be long, for an error."""
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
