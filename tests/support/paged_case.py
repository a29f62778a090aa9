"""Requests over a paged cache, for the tests of the attention kernels.

Memory that a kernel must not read is NaN: unused slots, page 0, the k and v heads beside q, the
output. Pages and rows of the page table are assigned in random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenloom.kernels.paged_attention import paged_attention_reference

# Tolerances for rounding the output and, in float16, the weights; values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (query heads, KV heads), head size, page size, types of the queries and of the cache
SHAPES = [
    ((1, 1), 64, 16, torch.float32, torch.float32),
    ((4, 2), 128, 16, torch.float16, torch.float16),
    ((3, 1), 80, 3, torch.float32, torch.float32),
    ((4, 1), 96, 1, torch.float16, torch.float16),
    ((5, 1), 256, 16, torch.bfloat16, torch.bfloat16),
    ((6, 1), 64, 16, torch.bfloat16, E4M3),
    ((7, 1), 128, 3, torch.float32, E5M2),
    ((8, 1), 80, 16, torch.float16, E4M3),
]
K_SCALE, V_SCALE = 0.5, 2.0


@dataclass
class PagedCase:
    q: torch.Tensor  # [T, H, D], part of a wider tensor
    k_cache: torch.Tensor  # [S, KH, D]
    v_cache: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    requests: list[tuple[int, int]]  # lengths of prefix and extend
    page_size: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def prefix_lens(self) -> torch.Tensor:
        return torch.tensor([prefix for prefix, _ in self.requests], dtype=torch.int32)

    @property
    def extend_lens(self) -> torch.Tensor:
        return torch.tensor([extend for _, extend in self.requests], dtype=torch.int32)

    @property
    def context_lens(self) -> torch.Tensor:
        return self.prefix_lens + self.extend_lens

    @property
    def query_starts(self) -> torch.Tensor:
        starts = torch.zeros(len(self.requests) + 1, dtype=torch.int32)
        starts[1:] = self.extend_lens.cumsum(0)
        return starts

    def empty_out(self) -> torch.Tensor:
        return torch.full(self.q.shape, torch.nan, dtype=self.q.dtype)

    def alone(self, index: int) -> "PagedCase":
        """Return a case with request `index` alone."""
        start, end = self.query_starts[index : index + 2].tolist()
        return PagedCase(
            self.q[start:end],
            self.k_cache,
            self.v_cache,
            self.page_table,
            self.rows[index : index + 1],
            self.requests[index : index + 1],
            self.page_size,
        )

    def slots(self, index: int) -> torch.Tensor:
        pages = self.page_table[int(self.rows[index])].long()[:, None] * self.page_size
        length = sum(self.requests[index])
        return (pages + torch.arange(self.page_size)).flatten()[:length]

    def check(self, out: torch.Tensor) -> None:
        expected = paged_attention_reference(
            self.q.float(),
            self.k_cache.float() * K_SCALE,
            self.v_cache.float() * V_SCALE,
            [self.slots(index) for index in range(len(self.requests))],
            [extend for _, extend in self.requests],
            self.scale,
        )
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def make_case(
    requests: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> PagedCase:
    generator = torch.Generator().manual_seed(len(requests) + head_dim + page_size)
    query_heads, kv_heads = heads
    pages = max(-(-(prefix + extend) // page_size) for prefix, extend in requests)
    num_rows = len(requests) + 2
    dealt = torch.randperm(num_rows * pages, generator=generator) + 1
    page_table = dealt.view(num_rows, pages).to(torch.int32)
    rows = torch.randperm(num_rows, generator=generator)[: len(requests)].to(torch.int32)
    shape = ((num_rows * pages + 1) * page_size, kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    tokens = sum(extend for _, extend in requests)
    qkv = torch.full((tokens, query_heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype)
    qkv[:, :query_heads] = torch.randn(tokens, query_heads, head_dim, generator=generator)
    case = PagedCase(qkv[:, :query_heads], *caches, page_table, rows, list(requests), page_size)
    for index, (prefix, extend) in enumerate(requests):
        for one, scale in zip(caches, (K_SCALE, V_SCALE), strict=True):
            values = torch.randn(prefix + extend, kv_heads, head_dim, generator=generator)
            one[case.slots(index)] = values / scale
    case.k_cache, case.v_cache = (one.to(cache or dtype) for one in caches)
    return case


def spread_over(case: PagedCase, slot_stride: int) -> None:
    """Move the caches of `case` to slots `slot_stride` apart, in mostly untouched memory."""
    slots, kv_heads, head_dim = case.k_cache.shape
    row = kv_heads * head_dim
    memory = torch.empty(slots * slot_stride, dtype=case.k_cache.dtype)
    moved = []
    for offset, one in ((0, case.k_cache), (row, case.v_cache)):
        view = memory.as_strided((slots, kv_heads, head_dim), (slot_stride, head_dim, 1), offset)
        view.copy_(one)
        moved.append(view)
    case.k_cache, case.v_cache = moved
