"""What a loader needs of a model's files, whatever their format, and the checks that hold for all.

A Checkpoint reads rows of one tensor at a time, so no tensor has to be in memory as a whole: a
loader holds the file's pages, what it has built and a few pieces. The formats are in
weights.py (safetensors), gguf_weights.py (GGUF) and dummy_weights.py (made up).
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from ...kernels.quantised_linear import BLOCK_ROWS, StreamedRows
from ...model_files.errors import ModelError
from .config import ModelSpec
from .llama import LlamaForCausalLM

Index = tuple[slice, ...]  # rows, and columns for a tensor of two dimensions
Progress = Callable[[int], object]  # called with the number of weights that were read
T = TypeVar("T")

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

    with reader_threads() as threads:
        for count in threads.map(fill, checkpoint.names):
            progress(count)


def reader_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_READ_AHEAD, torch.get_num_threads()))


def float_rows(
    checkpoint: Checkpoint, name: str, spec: ModelSpec, threads: ThreadPoolExecutor
) -> StreamedRows:
    """The rows of a matrix in float32, read piece by piece when they are wanted."""
    n, k = checkpoint.shape(name)

    def read(rows: slice) -> torch.Tensor:
        return checkpoint.read(name, (rows, slice(0, k))).float()

    slices = row_slices((n, k), spec.head_dim)
    return StreamedRows(_read_ahead(threads, read, slices), n, k)


def row_slices(shape: Sequence[int], head_dim: int) -> Iterator[slice]:
    """Slices that cover the rows of `shape` in pieces of whole heads and whole packed blocks."""
    unit = math.lcm(BLOCK_ROWS, head_dim)
    step = max(1, _PIECE_ELEMENTS // math.prod(shape[1:]) // unit) * unit
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _read_ahead(
    threads: ThreadPoolExecutor, read: Callable[[slice], T], slices: Iterator[slice]
) -> Iterator[T]:
    pending: deque[Future[T]] = deque()
    for rows in slices:
        pending.append(threads.submit(read, rows))
        if len(pending) > _READ_AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def some_names(names: Collection[str]) -> str:
    """The first names of a list that may be long, for an error."""
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
