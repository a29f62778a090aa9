"""LoRA adapters of many requests in one step: y += B (A x), with the adapter of each token's slot.

Called by the models. `lora_shrink` computes h = A x and `lora_expand` adds B h; nothing else reads
h. The host groups tokens by slot (plan_segments) and copies the groups into LoRASegments of fixed
size, so a graph can replay the ops. A token's result depends on no other token. Requests, adapter
names and policies must not enter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import backend

# Tokens per chunk. Both sizes give the same bits: the same instructions run in the same order.
# The longer one reads the matrices less often, the shorter one wastes less on few tokens.
DECODE_CHUNK = 16
EXTEND_CHUNK = 32


@dataclass(frozen=True, slots=True)
class LoRALinear:
    """Adapters, by slot, of one linear map or of up to three on the same input (q, k and v).

    Slot 0 means no adapter and is never read. If a part's rank is below ranks[slot], its rows of A
    or columns of B up to ranks[slot] are zero. Values beyond ranks[slot] are never read.
    """

    a: torch.Tensor  # [slots, parts * r_max, in], contiguous
    b: torch.Tensor  # [slots, out, r_max], contiguous, already scaled; dtype of a
    ranks: torch.Tensor  # [slots] int32, largest rank of the parts in a slot
    part_sizes: tuple[int, ...]  # outputs of each part, stacked in B; up to three parts

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
    """Tokens grouped by slot, int32: chunk i holds order[starts[i] : starts[i] + lens[i]]."""

    order: np.ndarray  # [T], tokens sorted by slot
    starts: np.ndarray  # [chunks]
    lens: np.ndarray  # [chunks], 1 to chunk_tokens
    slots: np.ndarray  # [chunks], never 0
    chunk_tokens: int


def plan_segments(slots_of_tokens: Sequence[int] | np.ndarray, chunk_tokens: int) -> SegmentPlan:
    """Group tokens into chunks of one slot each, on the host; slot 0 gets no chunk."""
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
    """Return the most chunks plan_segments makes; `max_adapters` counts slots other than 0."""
    return min(max_tokens, (max_tokens + max_adapters * (chunk_tokens - 1)) // chunk_tokens)


@dataclass(frozen=True, slots=True)
class LoRASegments:
    """A SegmentPlan on the device, int32; unused chunks have length 0 and slot 0.

    The runner copies each step's plan, padded, into the same memory.
    """

    order: torch.Tensor  # [T]
    starts: torch.Tensor  # [chunks]
    lens: torch.Tensor  # [chunks]
    slots: torch.Tensor  # [chunks]
    chunk_tokens: int


def lora_shrink(x: torch.Tensor, linear: LoRALinear, segments: LoRASegments) -> torch.Tensor:
    """Compute h [splits, T, parts * r_max] float32, whose sum over splits is A x.

    x [T, in] has dense rows and the dtype of `linear`. Rows in no chunk and columns beyond the rank
    are undefined. Raises ValueError on dtypes or shapes that disagree.
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
    """Compute lora_shrink of the one-hot vectors of ids [T] int64, that is, columns of A.

    For the embedding, where A is [slots, r_max, vocab]. Ids are not checked: embedding.py clamps
    them. Raises ValueError unless ids has one dimension and `linear` one part.
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
    """Add B h to y [T, out] in place. h is lora_shrink's result for the same segments.

    y has dense rows of 16-bit or 32-bit floats; sums are float32 and rounded once. Rows in no chunk
    do not change. Raises ValueError on shapes that disagree.
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
    """Yield (slot, token) of each token with an adapter, so that each is summed alone."""
    bounds = (segments.slots.tolist(), segments.starts.tolist(), segments.lens.tolist())
    for slot, start, length in zip(*bounds, strict=True):
        if slot:
            yield from ((slot, token) for token in segments.order[start : start + length].tolist())


def lora_reference(
    x: torch.Tensor, linear: LoRALinear, slots_of_tokens: Sequence[int]
) -> torch.Tensor:
    """Compute what lora_expand adds to y, token by token: [T, out] float32."""
    more = torch.zeros(x.shape[0], linear.b.shape[1])
    for token, slot in enumerate(slots_of_tokens):
        if slot == 0:
            continue
        rank = int(linear.ranks[slot])
        low = (linear.a[slot].float() @ x[token].float()).view(-1, linear.r_max)[:, :rank]
        parts = torch.split(linear.b[slot, :, :rank].float(), list(linear.part_sizes))
        more[token] = torch.cat([b @ one for b, one in zip(parts, low, strict=True)])
    return more
