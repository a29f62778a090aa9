"""Tensor parallelism: which share of a model one of N ranks computes, and how shares meet again.

Used by the models and the loader; the runner joins the ranks and hands a Shard down. Megatron's
split (arXiv:1909.08053): what makes heads and the inner size is cut by output rows, what takes them
in by input columns, and one sum after each pair makes the outputs whole. With one rank nothing is
communicated. Processes, sockets and batches are not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ...model_files.errors import ModelError
from .config import ModelSpec


@dataclass(slots=True, frozen=True)
class Shard:
    """One of `size` ranks, which call the methods below in the same order: each waits for all.

    They use the default group of torch.distributed, which exists by then if size is above 1.
    """

    rank: int = 0
    size: int = 1

    def cut(self, dim: int, whole: int) -> "Cut":
        """This rank's part of a dimension that `size` divides."""
        length = whole // self.size
        return Cut(dim, self.rank * length, length, whole)

    def sum(self, x: torch.Tensor) -> None:
        """The sum over all ranks, in place and with the same bits everywhere."""
        if self.size > 1:
            dist.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size * m] of the [n, m] of all ranks, in their order."""
        if self.size == 1:
            return x
        parts = list(x.new_empty(self.size, *x.shape).unbind(0))
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """The least of what the ranks say."""
        if self.size == 1:
            return number
        said = torch.tensor([number])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return int(said)


WHOLE = Shard()


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """What one rank computes: its heads and its part of the inner size. The rest is as it was.

    Of fewer KV heads than ranks each is held by several. ModelError where the ranks cannot share.
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
    """Which part of a checkpoint's tensor a rank holds: `length` of `whole` from `start` on."""

    dim: int
    start: int
    length: int
    whole: int

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.length),)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Shape of the whole tensor if the rank's part has `shape`."""
        return [self.whole if dim == self.dim else size for dim, size in enumerate(shape)]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.index]

    def shift(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the part at `index` of the rank's own tensor lies in the whole one."""
        return tuple(
            slice(one.start + self.start, one.stop + self.start) if dim == self.dim else one
            for dim, one in enumerate(index)
        )


def kv_cut(spec: ModelSpec, shard: Shard) -> Cut:
    """Rows of k and v of the whole model's spec. A head with several ranks is whole in each."""
    held = max(1, spec.num_kv_heads // shard.size)
    first = shard.rank * spec.num_kv_heads // shard.size
    return Cut(0, first * spec.head_dim, held * spec.head_dim, spec.kv_size)
