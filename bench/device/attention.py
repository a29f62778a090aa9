"""The attention kernels' speed, beside those of torch and of flashinfer over the same lengths.

Ours read a paged cache with pages in any order; torch's get keys and values that lie side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ...kernels.device_attention import device_attention
from .floors import attention_flops
from .lab import Lab
from .paged_cases import Paged
from .results import Report

DECODE_AIM = 0.8  # of copy bandwidth
COMPILE_SECONDS = 15.0


@dataclass(frozen=True)
class Lengths:
    """`rows` requests of `tokens` each: their last tokens alone, or whole prompts."""

    rows: int
    tokens: int
    is_decode: bool

    @property
    def name(self) -> str:
        kind = "decode" if self.is_decode else "prompt"
        return f"{kind} {self.rows} x {self.tokens}"


def attention(lab: Lab, report: Report) -> None:
    """Time our kernels against the aims, and torch's scaled_dot_product_attention."""
    for lengths in _lengths(lab):
        if report.has_time(lengths.name):
            # Launching a decode takes longer than computing it.
            how = lab.rig.captured_seconds if lengths.is_decode else lab.rig.seconds
            _add(lab, report, lengths, "ours", how(_ours(lab, lengths)))
        if report.has_time(lengths.name):
            _add(lab, report, lengths, "torch SDPA", lab.rig.seconds(_sdpa(lab, lengths)))


def other_attention(lab: Lab, report: Report) -> None:
    """Time peers that compile first, which cannot be interrupted."""
    for name, make in (("FlexAttention", _flex), ("flashinfer", _flashinfer)):
        for lengths in _lengths(lab):
            if not report.has_time(f"{lengths.name}: {name}", COMPILE_SECONDS):
                continue
            try:
                seconds = lab.rig.seconds(make(lab, lengths))
            except ImportError as error:
                report.missing(name, str(error))
                break
            except Exception as error:  # a peer that breaks is a fact about the peer
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                report.missing(f"{lengths.name}: {name}", why[:150])
                continue
            _add(lab, report, lengths, name, seconds)


def _lengths(lab: Lab) -> list[Lengths]:
    sizes = lab.sizes.attention
    decodes = [Lengths(*one, is_decode=True) for one in sizes.decodes]
    return decodes + [Lengths(*one, is_decode=False) for one in sizes.prompts]


def _add(lab: Lab, report: Report, lengths: Lengths, who: str, seconds: float) -> None:
    sizes = lab.sizes.attention
    name = f"{lengths.name}: {who}"
    if not lengths.is_decode:
        flops = attention_flops(sizes.heads * sizes.head_dim, lengths.tokens) * lengths.rows
        rate = flops / seconds
        note = f"{rate / lab.matrix_rate:.0%} of the matrix rate"
        report.add(name, rate / 1e12, "TFLOP/s", note=note)
        return
    row = 2 * sizes.kv_heads * sizes.head_dim * lab.sizes.dtype.itemsize
    share = lengths.rows * lengths.tokens * row / seconds / lab.copy_rate
    aimed = who == "ours" and (lengths.rows, lengths.tokens) == sizes.aimed
    note = f"{seconds * 1e6:.0f} us"
    report.add(name, share, "of copy", aim=DECODE_AIM if aimed else None, note=note)


def _random(lab: Lab, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=lab.rig.device.name, dtype=lab.sizes.dtype)


def _ours(lab: Lab, lengths: Lengths) -> Callable[[], torch.Tensor]:
    sizes, rows = lab.sizes.attention, lengths.rows
    each = (lengths.tokens - 1, 1) if lengths.is_decode else (0, lengths.tokens)
    paged = Paged.of([each] * rows, rows if lengths.is_decode else 0, sizes.page_size)
    heads = (sizes.heads, sizes.kv_heads, sizes.head_dim)
    plan = paged.plan(heads, lab.rig.device.name)
    q = _random(lab, paged.tokens, sizes.heads, sizes.head_dim)
    k_cache, v_cache = (
        _random(lab, paged.num_slots, sizes.kv_heads, sizes.head_dim) for _ in range(2)
    )
    out = torch.empty_like(q)
    scale = sizes.head_dim**-0.5
    if not lengths.is_decode:
        return lambda: device_attention(q, k_cache, v_cache, plan, scale)
    # A graph gives its result in one place; the copy is nothing beside what is read.
    return lambda: out.copy_(device_attention(q, k_cache, v_cache, plan, scale))


def _dense(lab: Lab, lengths: Lengths) -> tuple[torch.Tensor, ...]:
    sizes = lab.sizes.attention
    queries = 1 if lengths.is_decode else lengths.tokens
    q = _random(lab, lengths.rows, sizes.heads, queries, sizes.head_dim)
    kv = [
        _random(lab, lengths.rows, sizes.kv_heads, lengths.tokens, sizes.head_dim) for _ in range(2)
    ]
    return q, *kv


def _sdpa(lab: Lab, lengths: Lengths) -> Callable[[], object]:
    q, k, v = _dense(lab, lengths)
    causal = not lengths.is_decode
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)


def _flex(lab: Lab, lengths: Lengths) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _dense(lab, lengths)
    mask = None
    if not lengths.is_decode:

        def causal(
            _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            return query >= key

        tokens = lengths.tokens
        mask = create_block_mask(causal, None, None, tokens, tokens, device=lab.rig.device.name)
    compiled = torch.compile(flex_attention)
    return partial(compiled, q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer(lab: Lab, lengths: Lengths) -> Callable[[], object]:
    import flashinfer

    sizes, rows = lab.sizes.attention, lengths.rows
    device, dtype = lab.rig.device.name, lab.sizes.dtype
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    pages_of_row = -(-lengths.tokens // sizes.page_size)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * pages_of_row
    pages = torch.randperm(rows * pages_of_row, device=device).to(torch.int32)
    last = torch.full((rows,), (lengths.tokens - 1) % sizes.page_size + 1, dtype=torch.int32)
    last = last.to(device)
    cache = _random(lab, len(pages), 2, sizes.page_size, sizes.kv_heads, sizes.head_dim)
    shape = (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.page_size)
    if lengths.is_decode:
        q = _random(lab, rows, sizes.heads, sizes.head_dim)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts, pages, last, *shape, q_data_type=dtype, kv_data_type=dtype)
    else:
        q = _random(lab, rows * lengths.tokens, sizes.heads, sizes.head_dim)
        firsts = torch.arange(rows + 1, dtype=torch.int32, device=device) * lengths.tokens
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            firsts, starts, pages, last, *shape, causal=True, q_data_type=dtype, kv_data_type=dtype
        )
    return partial(wrapper.run, q, cache)
