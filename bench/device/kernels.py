"""Every op of kernels/cuda against its float32 reference, on the device: a few shapes each.

The references run on the CPU over the same numbers. Outputs and what a kernel must not read are
NaN before it runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.cuda import sampling as sampling_kernel
from ...kernels.embedding import embed, embed_reference
from ...kernels.rms_norm import rms_norm, rms_norm_reference
from ...kernels.rotary import apply_rotary_reference
from ...kernels.rotary_kv_store import rotary_kv_store
from ...kernels.sampling import Draw, choose_reference
from ...kernels.silu_mul import silu_mul, silu_mul_reference
from .lab import Lab
from .lora_cases import lora_cases
from .paged_cases import attention_cases
from .results import CheckFailed, Report
from .sizes import KernelSizes

# Tolerances for values of about 1: rounding once or twice to the type.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SAMPLING_VOCAB = 5000


@dataclass(frozen=True)
class Case:
    """`run` returns the kernel's output and the expected one, on the CPU in float32."""

    op: str
    name: str
    tolerance: float
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def kernels(lab: Lab, report: Report) -> None:
    """The largest error of each op, as a share of what is allowed; in the end CheckFailed."""
    worst: dict[str, float] = {}
    wrong = []
    for case in cases(lab.rig.device.name, lab.sizes.kernels):
        if not report.has_time(f"{case.op} {case.name}"):
            break
        try:
            share = _error(*case.run()) / case.tolerance
        except Exception as error:  # one kernel that does not compile must not hide the others
            wrong.append(f"{case.op} {case.name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        worst[case.op] = max(worst.get(case.op, 0.0), share)
        if share > 1:
            wrong.append(f"{case.op} {case.name}: {share:.3g} of the tolerance")
    for op, share in worst.items():
        report.add(f"{op}: error over tolerance", share, aim=1.0, at_most=True)
    if wrong:
        raise CheckFailed("; ".join(wrong))


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative for values above 1; infinite for NaN."""
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    return float(((got - expected).abs() / expected.abs().clamp_min(1.0)).max())


def cases(device: str, sizes: KernelSizes) -> Iterator[Case]:
    """Compiling takes longest, and what errs most easily comes first."""
    for op, variant, dtype, run in attention_cases(device, sizes):
        yield Case(op, variant, TOLERANCE[dtype], run)
    yield Case("sampling", "ids", 0.5, lambda: sampled(device))
    first = sizes.dtypes[0]
    for op, variant, run in lora_cases(device, sizes, first):
        yield Case(op, f"{first} {variant}", 2 * TOLERANCE[first], run)
    for dtype in sizes.dtypes:
        shapes = sizes.heads if dtype == first else sizes.heads[:1]
        for op, run in elementwise(device, sizes, dtype, shapes):
            yield Case(op, str(dtype), TOLERANCE[dtype], run)


Pair = tuple[torch.Tensor, torch.Tensor]


def elementwise(
    device: str, sizes: KernelSizes, dtype: torch.dtype, heads: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[str, Callable[[], Pair]]]:
    def random(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(dtype)

    tokens, hidden = sizes.tokens, sizes.hidden
    x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)

    def norm() -> Pair:
        got = rms_norm(x.to(device), weight.to(device), 1e-5)
        return got.float().cpu(), rms_norm_reference(x, weight, 1e-5)

    def residual_norm() -> Pair:
        kept = residual.to(device, copy=True)
        got = rms_norm(x.to(device), weight.to(device), 1e-5, kept)
        total = x.float() + residual.float()
        # normed from the rounded sum, as the kernel keeps it
        expected = rms_norm_reference(total.to(dtype), weight, 1e-5)
        return torch.stack((got, kept)).float().cpu(), torch.stack((expected, total))

    def activation() -> Pair:
        return silu_mul(x.to(device)).float().cpu(), silu_mul_reference(x)

    def embedding() -> Pair:
        table = random(sizes.vocab, 64)
        ids = torch.randint(sizes.vocab, (tokens,), dtype=torch.int32)
        rows = torch.arange(tokens, dtype=torch.int32) % 5 - 1
        last = torch.tensor([3, sizes.vocab - 1, -1, 0], dtype=torch.int32)
        got, _ = embed(*(one.to(device) for one in (table, ids, rows, last)))
        return got.float().cpu(), embed_reference(table, ids, rows, last).float()

    yield "rms_norm", norm
    yield "rms_norm residual", residual_norm
    yield "silu_mul", activation
    yield "embedding", embedding
    for shape in heads:
        yield "rotary_kv_store", partial(rotary, device, sizes, dtype, shape)


def rotary(
    device: str, sizes: KernelSizes, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Pair:
    heads, kv_heads, head_dim = shape
    tokens = sizes.tokens
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    positions = torch.randint(100, (tokens,), dtype=torch.int32)
    angles = torch.randn(100, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    slots = torch.randperm(2 * tokens)[:tokens].to(torch.int32)
    there, k_cache, v_cache = (
        one.to(device, copy=True)
        for one in (qkv, *torch.full((2, 2 * tokens, kv_heads, head_dim), torch.nan).to(dtype))
    )
    where = (positions.to(device), cos_sin.to(device), k_cache, v_cache, slots.to(device))
    rotary_kv_store(there, heads, kv_heads, *where)
    turned = apply_rotary_reference(qkv[:, : heads + kv_heads].float(), positions.long(), cos_sin)
    at = slots.long().to(device)
    got = torch.cat((there[:, :heads], k_cache[at], v_cache[at]), 1)
    expected = torch.cat((turned, qkv[:, heads + kv_heads :].float()), 1)
    return got.float().cpu(), expected


def sampled(device: str) -> Pair:
    """Ids of rows that ask for different things, as numbers: any other id is an error."""
    hows = [
        None,
        Draw(1.0, 0, 1.0, 0.0, 1, 0),
        Draw(0.7, 0, 0.9, 0.0, 2, 5),
        Draw(1.3, 40, 1.0, 0.0, 3, 7),
        Draw(0.9, 200, 0.8, 0.05, 4, 1),
    ]
    vocab = SAMPLING_VOCAB
    logits = 3 * torch.randn(len(hows), vocab, generator=torch.Generator().manual_seed(0))
    work = sampling_kernel.workspace(len(hows), vocab, torch.device(device))
    tables = sampling_kernel.row_tables(len(hows), work, edits=1)
    for row, how in enumerate(hows):
        floats, ints = sampling_kernel.row_columns(how, vocab, how.position if how else 0)
        tables.floats[row].copy_(torch.tensor(floats))
        tables.ints[row].copy_(torch.tensor(ints))
    rows = torch.arange(len(hows), dtype=torch.int32, device=device)
    next_ids = torch.full_like(rows, -7)
    sampling_kernel.sample(
        logits.to(device), rows, tables, work, next_ids, vocab, sampling_kernel.EVERYTHING
    )
    expected = [choose_reference(row, how) for row, how in zip(logits, hows, strict=True)]
    return next_ids.float().cpu(), torch.tensor(expected).float()
