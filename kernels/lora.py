"""Low-rank adapters of many requests in one step: y += B (A x), each token with its own slot's.

Called by the models. `lora_shrink` makes A x, `lora_expand` adds B times that; between them lies
h, which only they read. Tokens are grouped by slot on the host (plan_segments); the groups come
to the device in LoRASegments, whose size is fixed, so that a graph can replay the ops. A token's
result depends on no other token. No request, no name of an adapter and no policy enter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import backend

# Tokens of a chunk. Both are worked on by the same instructions in the same order; the longer
# one reads the matrices less often, the shorter one wastes less on few tokens.
DECODE_CHUNK = 16
EXTEND_CHUNK = 32


@dataclass(frozen=True, slots=True)
class LoRALinear:
    """The adapters of one linear map, or of several on the same input (q, k and v), by slot.

    Slot 0 is no adapter: never read. From a part's own rank up to ranks[slot] the rows of A or the
    columns of B are zero; what lies beyond does not matter.
    """

    a: torch.Tensor  # [slots, parts * r_max, in], contiguous
    b: torch.Tensor  # [slots, out, r_max], contiguous, the scaling in it; type of a
    ranks: torch.Tensor  # [slots] int32, the largest rank of the slot's parts
    part_sizes: tuple[int, ...]  # up to three; outputs of each part, one below the other in B

    def __post_init__(self) -> None:
        parts, (slots, out, r_max) = len(self.part_sizes), self.b.shape
        if (
            parts > 3
            or out != sum(self.part_sizes)
            or self.a.shape[:2] != (slots, parts * r_max)
            or self.ranks.shape != (slots,)
            or self.a.dtype != self.b.dtype
        ):
            raise ValueError(
                f"a {tuple(self.a.shape)}, b {tuple(self.b.shape)}, ranks "
                f"{tuple(self.ranks.shape)} and parts {self.part_sizes} do not fit"
            )

    @property
    def r_max(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Which tokens have which slot, int32: chunk i is order[starts[i] : starts[i] + lens[i]]."""

    order: np.ndarray  # [T], tokens sorted by slot
    starts: np.ndarray  # [chunks]
    lens: np.ndarray  # [chunks], 1 to chunk_tokens
    slots: np.ndarray  # [chunks], never 0
    chunk_tokens: int


def plan_segments(slots_of_tokens: Sequence[int] | np.ndarray, chunk_tokens: int) -> SegmentPlan:
    """Chunks of tokens with one slot each; tokens of slot 0 are in none. On the host."""
    slots = np.asarray(slots_of_tokens, dtype=np.int64)
    counts = np.bincount(slots, minlength=1)
    chunks_of = -(-counts // chunk_tokens)
    chunks_of[0] = 0
    chunk_slots = np.repeat(np.arange(counts.size), chunks_of)
    first_chunk = np.cumsum(chunks_of) - chunks_of
    done = (np.arange(chunk_slots.size) - first_chunk[chunk_slots]) * chunk_tokens
    starts = (np.cumsum(counts) - counts)[chunk_slots] + done
    lens = np.minimum(counts[chunk_slots] - done, chunk_tokens)
    order = np.argsort(slots, kind="stable")
    return SegmentPlan(
        order.astype(np.int32),
        starts.astype(np.int32),
        lens.astype(np.int32),
        chunk_slots.astype(np.int32),
        chunk_tokens,
    )


def max_chunks(max_tokens: int, max_adapters: int, chunk_tokens: int) -> int:
    """The most chunks that plan_segments makes of so many tokens, of up to so many slots but 0."""
    return min(max_tokens, (max_tokens + max_adapters * (chunk_tokens - 1)) // chunk_tokens)


@dataclass(frozen=True, slots=True)
class LoRASegments:
    """A SegmentPlan on the device, int32; unused chunks have length 0 and slot 0.

    The runner copies the plan of each step into the same memory, and pads it.
    """

    order: torch.Tensor  # [T]
    starts: torch.Tensor  # [chunks]
    lens: torch.Tensor  # [chunks]
    slots: torch.Tensor  # [chunks]
    chunk_tokens: int


def lora_shrink(x: torch.Tensor, linear: LoRALinear, segments: LoRASegments) -> torch.Tensor:
    """h of x [T, in], whose type is that of `linear` and whose rows are dense.

    h [splits, T, parts * r_max] float32: the sum over splits is A x. Rows of no chunk and columns
    beyond the rank are undefined. Raises ValueError on shapes that disagree.
    """
    if x.shape[1:] != linear.a.shape[2:] or x.dtype != linear.a.dtype:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} does not fit a {tuple(linear.a.shape)}")
    if backend.on_triton(x):
        from .cuda import lora as kernel

        return kernel.shrink(x, linear.a, linear.ranks, len(linear.part_sizes), segments)
    h = torch.empty(1, x.shape[0], linear.a.shape[1])
    for slot, token in _tokens(segments):
        h[0, token] = linear.a[slot].float() @ x[token].float()
    return h


def lora_shrink_ids(ids: torch.Tensor, linear: LoRALinear, segments: LoRASegments) -> torch.Tensor:
    """h as lora_shrink makes it, of the one-hot vectors of ids [T] int64: columns of A.

    For the embedding, where A is [slots, r_max, vocab]. Ids are trusted (embedding.py).
    """
    if ids.dim() != 1 or len(linear.part_sizes) != 1:
        raise ValueError(f"ids {tuple(ids.shape)} of {len(linear.part_sizes)} parts: not of one")
    if backend.on_triton(ids):
        from .cuda import lora as kernel

        return kernel.shrink_ids(ids, linear.a, linear.ranks, segments)
    h = torch.empty(1, ids.shape[0], linear.a.shape[1])
    for slot, token in _tokens(segments):
        h[0, token] = linear.a[slot][:, ids[token]].float()
    return h


def lora_expand(
    h: torch.Tensor, linear: LoRALinear, segments: LoRASegments, y: torch.Tensor
) -> None:
    """y [T, out] += B h, where h is from lora_shrink over the same segments. Rows of y are dense.

    y is of 16 bits or float32: sums are float32 and rounded once. Rows of no chunk keep their bits.
    Raises ValueError on shapes that disagree.
    """
    if y.shape != (h.shape[1], linear.b.shape[1]) or h.shape[2] != linear.a.shape[1]:
        raise ValueError(
            f"y {tuple(y.shape)}, h {tuple(h.shape)} and b {tuple(linear.b.shape)} do not fit"
        )
    if backend.on_triton(y):
        from .cuda import lora as kernel

        kernel.expand(h, linear.b, linear.ranks, linear.part_sizes, segments, y)
        return
    for slot, token in _tokens(segments):
        rank = int(linear.ranks[slot])
        low = h[0, token].view(-1, linear.r_max)[:, :rank]
        parts = torch.split(linear.b[slot, :, :rank].float(), list(linear.part_sizes))
        more = torch.cat([b @ one for b, one in zip(parts, low, strict=True)])
        y[token] = (y[token].float() + more).to(y.dtype)


def _tokens(segments: LoRASegments) -> Iterator[tuple[int, int]]:
    """Slot and token of all that have an adapter, one by one: none is summed beside others."""
    bounds = (segments.slots.tolist(), segments.starts.tolist(), segments.lens.tolist())
    for slot, start, length in zip(*bounds, strict=True):
        if slot:
            yield from ((slot, token) for token in segments.order[start : start + length].tolist())


def lora_reference(
    x: torch.Tensor, linear: LoRALinear, slots_of_tokens: Sequence[int]
) -> torch.Tensor:
    """What is added to y [T, out], float32, token by token."""
    more = torch.zeros(x.shape[0], linear.b.shape[1])
    for token, slot in enumerate(slots_of_tokens):
        if slot == 0:
            continue
        rank = int(linear.ranks[slot])
        low = (linear.a[slot].float() @ x[token].float()).view(-1, linear.r_max)[:, :rank]
        parts = torch.split(linear.b[slot, :, :rank].float(), list(linear.part_sizes))
        more[token] = torch.cat([b @ one for b, one in zip(parts, low, strict=True)])
    return more
