"""Tensor parallelism: which part of a model each rank computes, and how the parts are combined.

Used by the models and the loader; the runner connects the ranks and passes a Shard. Megatron's
split (arXiv:1909.08053): qkv and gate_up are cut by output rows, o and down by input columns, each
followed by one sum over ranks. One rank communicates nothing. Processes, sockets and batches must
not enter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...model_files.errors import ModelError
from .config import ModelSpec


@dataclass(slots=True, frozen=True)
class Shard:
    """One of `size` ranks. All ranks must call sum, gather and smallest in the same order.

    These use the default group of torch.distributed, which must exist if size is above 1.
    """

    rank: int = 0
    size: int = 1

    def cut(self, dim: int, whole: int) -> "Cut":
        """Return this rank's part of dimension `dim`; its length `whole` is a multiple of size."""
        length = whole // self.size
        return Cut(dim, self.rank * length, length, whole)

    def sum(self, x: torch.Tensor) -> None:
        """Sum x over all ranks in place, with the same bits on each."""
        if self.size > 1:
            dist.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x [n, m] of all ranks, in rank order, to [n, size * m]."""
        if self.size == 1:
            return x
        parts = list(x.new_empty(self.size, *x.shape).unbind(0))
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        if self.size == 1:
            return number
        said = torch.tensor([number])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return int(said)


WHOLE = Shard()


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the spec with one rank's heads and part of intermediate_size.

    With fewer KV heads than ranks, several ranks hold each. Raises ModelError if the ranks cannot
    split the heads or the inner size.
    """
    if shard.size == 1:
        return spec
    for what, number in (
        ("attention heads", spec.num_heads),
        ("rows in an MLP (intermediate_size)", spec.intermediate_size),
    ):
        if number % shard.size:
            raise ModelError(f"--tp {shard.size} does not divide the model's {number} {what}")
    kv_heads = spec.num_kv_heads
    if kv_heads % shard.size and shard.size % kv_heads:
        raise ModelError(
            f"--tp {shard.size} and the model's {kv_heads} KV heads: neither divides the other"
        )
    return replace(
        spec,
        num_heads=spec.num_heads // shard.size,
        num_kv_heads=max(1, kv_heads // shard.size),
        intermediate_size=spec.intermediate_size // shard.size,
    )


@dataclass(slots=True, frozen=True)
class Cut:
    """The part of a checkpoint tensor that a rank holds: `length` of `whole` from `start` on."""

    dim: int
    start: int
    length: int
    whole: int

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole tensor if the rank's part has `shape`."""
        return [self.whole if dim == self.dim else size for dim, size in enumerate(shape)]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.index]

    def shift(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Translate an index into the rank's part to one into the whole tensor."""
        return tuple(
            slice(one.start + self.start, one.stop + self.start) if dim == self.dim else one
            for dim, one in enumerate(index)
        )


def kv_cut(spec: ModelSpec, shard: Shard) -> Cut:
    """Return the rank's rows of k and v; `spec` is the whole model's. Heads are never split."""
    held = max(1, spec.num_kv_heads // shard.size)
    first = shard.rank * spec.num_kv_heads // shard.size
    return Cut(0, first * spec.head_dim, held * spec.head_dim, spec.kv_size)
