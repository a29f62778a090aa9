"""Attention shapes and types for which both attention kernels are compiled ahead of time."""

from dataclasses import dataclass

import torch

CONTEXT = 1 << 17
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    model: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        dtype, cache = (str(one).removeprefix("torch.") for one in (self.dtype, self.cache))
        return f"{dtype} {self.model}" + (f" cache {cache}" if cache != dtype else "")

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q (a slice of qkv), both caches, page table, a step's column, out; on device `meta`."""
        heads = self.heads + 2 * self.kv_heads
        qkv = torch.empty(8, heads, self.head_dim, dtype=self.dtype, device="meta")
        cache = torch.empty(64, self.kv_heads, self.head_dim, dtype=self.cache, device="meta")
        page_table = torch.empty(8, CONTEXT // _PAGE_SIZE, dtype=torch.int32, device="meta")
        q = qkv[:, : self.heads]
        return q, cache, cache, page_table, page_table[:, 0], torch.empty_like(q)


VARIANTS = (
    Variant("llama3 8b", 32, 8, 128),
    Variant("llama3 8b", 32, 8, 128, torch.float16, torch.float16),
    Variant("llama3 8b", 32, 8, 128, torch.bfloat16, torch.float8_e4m3fn),
    Variant("llama3 8b", 32, 8, 128, torch.bfloat16, torch.float8_e5m2),
    Variant("llama3 8b", 32, 8, 128, torch.float32, torch.float32),
    Variant("smollm2 135m", 9, 3, 64),
    Variant("smollm2 135m", 9, 3, 64, torch.bfloat16, torch.float8_e4m3fn),
    Variant("qwen2.5 7b", 28, 4, 128),
    Variant("phi2", 32, 32, 80),
    Variant("phi3 mini", 32, 32, 96),
    Variant("gemma2 2b", 8, 4, 256),
    Variant("gemma2 2b", 8, 4, 256, torch.bfloat16, torch.float8_e4m3fn),
)
