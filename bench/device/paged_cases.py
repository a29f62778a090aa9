"""Both attention kernels against their reference, and the paged caches that they run over.

Used by kernels.py and, for the caches, by attention.py. Slots that no request holds are NaN, and
so is page 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.cuda.decode_attention import DecodeScratch, max_splits
from ...kernels.device_attention import DevicePlan, device_attention
from ...kernels.paged_attention import paged_attention_reference
from .sizes import KernelSizes

Pair = tuple[torch.Tensor, torch.Tensor]
K_SCALE, V_SCALE = 0.5, 2.0  # of caches of 8 bits
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Paged:
    """Requests of (prefix, new tokens); the first `decodes` have one new token each."""

    requests: list[tuple[int, int]]
    decodes: int
    page_size: int
    pages: torch.Tensor  # [R, P] int32 on the CPU, none twice

    @staticmethod
    def of(requests: list[tuple[int, int]], decodes: int, page_size: int) -> "Paged":
        each = max(-(-(prefix + new) // page_size) for prefix, new in requests)
        generator = torch.Generator().manual_seed(each)
        dealt = torch.randperm(len(requests) * each, generator=generator) + 1
        return Paged(requests, decodes, page_size, dealt.view(-1, each).to(torch.int32))

    @property
    def num_slots(self) -> int:
        return (self.pages.numel() + 1) * self.page_size

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.requests)

    def slots(self, index: int) -> torch.Tensor:
        first = self.pages[index].long()[:, None] * self.page_size
        length = sum(self.requests[index])
        return (first + torch.arange(self.page_size)).flatten()[:length]

    def plan(self, heads: tuple[int, int, int], device: str) -> DevicePlan:
        query_heads, kv_heads, head_dim = heads
        prefix, new = (
            torch.tensor(column, dtype=torch.int32, device=device)
            for column in zip(*self.requests, strict=True)
        )
        starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        splits = max_splits(kv_heads, self.pages.shape[1] * self.page_size)
        rows = len(self.requests)
        return DevicePlan(
            page_table=self.pages.to(device),
            page_size=self.page_size,
            rows=torch.arange(rows, dtype=torch.int32, device=device),
            prefix_lens=prefix,
            extend_lens=new,
            context_lens=prefix + new,
            query_starts=starts,
            num_decodes=self.decodes,
            scratch=DecodeScratch(rows, query_heads, head_dim, splits, torch.device(device)),
        )


def attention_cases(
    device: str, sizes: KernelSizes
) -> Iterator[tuple[str, str, torch.dtype, Callable[[], Pair]]]:
    """Op, name, type and case: decodes of all contexts, then a mixed step of extends behind one."""
    steps = {
        "decode attention": Paged.of(
            [(context - 1, 1) for context in sizes.contexts], len(sizes.contexts), sizes.page_size
        ),
        "extend attention": Paged.of([(20, 1), *sizes.extends], 1, sizes.page_size),
    }
    for op, paged in steps.items():
        for heads, dtype, cache in _variants(sizes):
            name = f"{heads} {dtype} cache {cache}".replace("torch.", "")
            yield op, name, dtype, partial(_attend, device, paged, heads, dtype, cache)


def _variants(
    sizes: KernelSizes,
) -> Iterator[tuple[tuple[int, int, int], torch.dtype, torch.dtype]]:
    """Compiling takes longest: all types for the first heads, the first type for the others."""
    first, *others = sizes.heads
    yield from ((first, dtype, dtype) for dtype in sizes.dtypes)
    if sizes.caches_of_8_bits:
        yield from ((first, sizes.dtypes[0], cache) for cache in FP8)
    yield from ((heads, sizes.dtypes[0], sizes.dtypes[0]) for heads in others)


def _attend(
    device: str,
    paged: Paged,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    cache: torch.dtype,
) -> Pair:
    query_heads, kv_heads, head_dim = heads
    scales = (K_SCALE, V_SCALE) if cache in FP8 else (1.0, 1.0)
    q = torch.randn(paged.tokens, query_heads, head_dim).to(dtype)
    caches = []
    for scale in scales:
        values = torch.full((paged.num_slots, kv_heads, head_dim), torch.nan)
        for index in range(len(paged.requests)):
            slots = paged.slots(index)
            values[slots] = torch.randn(len(slots), kv_heads, head_dim) / scale
        caches.append(values.to(cache))
    there = [one.to(device) for one in (q, *caches)]
    score_scale = head_dim**-0.5
    plan = paged.plan(heads, device)
    plan.scratch.partial.fill_(torch.nan)
    plan.scratch.log_sums.fill_(torch.nan)
    got = device_attention(there[0], there[1], there[2], plan, score_scale, *scales)
    expected = paged_attention_reference(
        q.float(),
        caches[0].float() * scales[0],
        caches[1].float() * scales[1],
        [paged.slots(index) for index in range(len(paged.requests))],
        [new for _, new in paged.requests],
        score_scale,
    )
    return got.float().cpu(), expected
