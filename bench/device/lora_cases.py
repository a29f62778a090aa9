"""The ops of adapters against their reference, for kernels.py: slots of all ranks in one step."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...kernels.lora import (
    DECODE_CHUNK,
    EXTEND_CHUNK,
    LoRALinear,
    LoRASegments,
    lora_expand,
    lora_reference,
    lora_shrink,
    lora_shrink_ids,
    plan_segments,
)
from .sizes import KernelSizes

Pair = tuple[torch.Tensor, torch.Tensor]
SPARE = 3  # chunks that the plan does not need, as graphs have them


def lora_cases(
    device: str, sizes: KernelSizes, dtype: torch.dtype
) -> Iterator[tuple[str, str, Callable[[], Pair]]]:
    slots = [index % 4 for index in range(sizes.tokens)]
    for chunk in (DECODE_CHUNK, EXTEND_CHUNK):
        for parts in ((sizes.hidden,), (sizes.hidden, 96, 96)):
            variant = f"chunk {chunk}, {len(parts)} parts"
            linear = _linear(sizes, dtype, parts)
            yield "lora", variant, partial(_maps, device, linear, chunk, slots)
        yield "lora ids", f"chunk {chunk}", partial(_ids, device, sizes, dtype, chunk, slots)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _linear(
    sizes: KernelSizes, dtype: torch.dtype, parts: tuple[int, ...], inputs: int | None = None
) -> LoRALinear:
    """Slots 1 to 3 have 1, half and all of the ranks; what is beyond is NaN, like slot 0."""
    rank, inputs = sizes.rank, inputs or sizes.hidden
    ranks = [0, 1, max(1, rank // 2), rank]
    a = _random(len(ranks), len(parts) * rank, inputs) * inputs**-0.5
    b = _random(len(ranks), sum(parts), rank) * rank**-0.5
    for slot, known in enumerate(ranks):
        a[slot].view(len(parts), rank, inputs)[:, known:] = torch.nan
        b[slot, :, known:] = torch.nan
    return LoRALinear(a.to(dtype), b.to(dtype), torch.tensor(ranks, dtype=torch.int32), parts)


def _there(linear: LoRALinear, device: str) -> LoRALinear:
    a, b, ranks = (one.to(device) for one in (linear.a, linear.b, linear.ranks))
    return LoRALinear(a, b, ranks, linear.part_sizes)


def _segments(slots: list[int], chunk: int, device: str) -> LoRASegments:
    plan = plan_segments(slots, chunk)
    starts, lens, of_chunks = (
        torch.nn.functional.pad(torch.from_numpy(one), (0, SPARE)).to(device)
        for one in (plan.starts, plan.lens, plan.slots)
    )
    return LoRASegments(torch.from_numpy(plan.order).to(device), starts, lens, of_chunks, chunk)


def _maps(device: str, linear: LoRALinear, chunk: int, slots: list[int]) -> Pair:
    x = _random(len(slots), linear.a.shape[2]).to(linear.a.dtype)
    base = _random(len(slots), linear.b.shape[1]).to(linear.a.dtype)
    y, there = base.to(device, copy=True), _there(linear, device)
    where = _segments(slots, chunk, device)
    lora_expand(lora_shrink(x.to(device), there, where), there, where, y)
    return y.float().cpu(), base.float() + lora_reference(x, linear, slots)


def _ids(device: str, sizes: KernelSizes, dtype: torch.dtype, chunk: int, slots: list[int]) -> Pair:
    linear = _linear(sizes, dtype, (64,), inputs=sizes.vocab)
    ids = torch.randint(sizes.vocab, (len(slots),))
    y, there = torch.zeros(len(slots), 64, device=device), _there(linear, device)
    where = _segments(slots, chunk, device)
    lora_expand(lora_shrink_ids(ids.to(device), there, where), there, where, y)
    expected = torch.zeros(len(slots), 64)
    for token, slot in enumerate(slots):
        if slot:
            rank = int(linear.ranks[slot])
            column = linear.a[slot, :rank, ids[token]].float()
            expected[token] = linear.b[slot, :, :rank].float() @ column
    return y.float().cpu(), expected
