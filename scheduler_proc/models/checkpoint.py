"""The Checkpoint interface to a model's weights, with checks and readers for every format.

Called by loader.py and packed.py. A Checkpoint reads a few rows of one tensor at a time, so a
loader need not hold whole tensors beside what it builds. File formats must not enter: see
weights.py (safetensors), gguf_weights.py (GGUF) and dummy_weights.py (random).
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

Index = tuple[slice, ...]  # (rows,) or (rows, columns)
Progress = Callable[[int], object]  # called with the number of weights that were read

_PIECE_ELEMENTS = 1 << 19  # per read; 2 MB in float32
_READ_AHEAD = 4  # pieces that threads read ahead


class Checkpoint(Protocol):
    """Tensors of a model's files, under the names of a Hugging Face checkpoint."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> list[int]: ...

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Read the part of a tensor at `index` as floats. Called from several threads.

        Rows must be whole heads if the tensor has heads.
        """
        ...

    def blocks(self, name: str) -> StreamedRows | None:
        """Return the file's quantised rows if a packed format holds them exactly, else None."""
        ...


def check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """Raise ModelError if tensors are unknown or missing."""
    unknown = [name for name in found if name not in wanted]
    if unknown:
        raise ModelError(f"the model files hold tensors that are not used: {some_names(unknown)}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"the model files lack tensors: {some_names(missing)}")


def check_tensors(wanted: Mapping[str, Sequence[int]], found: Checkpoint) -> None:
    """Raise ModelError for tensors that are missing, unknown or not of the `wanted` shape."""
    check_names(found.names, wanted)
    for name, shape in wanted.items():
        if found.shape(name) != list(shape):
            raise ModelError(
                f"{name} has shape {found.shape(name)}, the config asks for {list(shape)}"
            )


def fill_model(model: LlamaForCausalLM, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy each tensor, or this rank's part, into its slot. Call check_tensors first."""

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
    """Reads rows of matrices as float32 ahead of their use, with a few threads.

    Buffers are reused for every piece: new ones cost a hundred megabytes of allocator slack.
    """

    def __init__(self, checkpoint: Checkpoint, head_dim: int) -> None:
        self._checkpoint = checkpoint
        self._head_dim = head_dim
        self._threads = ThreadPoolExecutor(min(_READ_AHEAD, torch.get_num_threads()))
        # One more piece is with the caller, and one is submitted before the next is yielded.
        self._buffers = [torch.empty(0)] * (_READ_AHEAD + 2)

    def rows(self, name: str) -> StreamedRows:
        """Stream the rows of a matrix; each piece is valid until the next is requested."""
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
    """Yield slices that cover the rows of `shape` in whole heads and whole packed blocks."""
    unit = math.lcm(BLOCK_ROWS, head_dim)
    step = max(1, _PIECE_ELEMENTS // math.prod(shape[1:]) // unit) * unit
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def some_names(names: Collection[str]) -> str:
    """Format up to eight names and the number of the others, for an error message."""
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
