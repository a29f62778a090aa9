"""Default step sizes per device. PURE.

Each process that runs the model calls `resolve_scheduling` once; no other module chooses these
numbers.
"""

from typing import Literal

import msgspec

from .scheduling_config import SchedulingConfig, SchedulingFlags

DEFAULTS = {
    "cpu": SchedulingConfig(),
    # Reading the weights is most of a small step on a GPU, so more rows cost little, and prefill
    # reaches full speed only with thousands of tokens per step.
    "cuda": SchedulingConfig(
        max_running_requests=256, max_prefill_tokens=8192, chunked_prefill_size=8192
    ),
}


def resolve_scheduling(flags: SchedulingFlags, device: Literal["cpu", "cuda"]) -> SchedulingConfig:
    """Fill the sizes that were not given with the defaults of `device`.

    A default `max_prefill_tokens` is raised to a larger `chunked_prefill_size`.
    """
    defaults = DEFAULTS[device]
    given = msgspec.structs.asdict(flags)
    rows, most, chunk = (
        given.pop(name)
        for name in ("max_running_requests", "max_prefill_tokens", "chunked_prefill_size")
    )
    if chunk is None:
        chunk = defaults.chunked_prefill_size
    return SchedulingConfig(
        max_running_requests=rows or defaults.max_running_requests,
        max_prefill_tokens=most or max(defaults.max_prefill_tokens, chunk),
        chunked_prefill_size=chunk,
        **given,
    )


def step_sizes(scheduling: SchedulingConfig) -> str:
    """Describe the largest step in a line for the log."""
    chunk, mixed = scheduling.chunked_prefill_size, scheduling.mixed_chunk_size
    tokens = min(chunk or scheduling.max_prefill_tokens, scheduling.max_prefill_tokens)
    cut = "cut" if chunk else "not cut"
    if not chunk or mixed == 0:
        beside = "no bound of its own"
    elif mixed is not None:
        beside = f"{mixed} tokens (--mixed-chunk-size)"
    elif scheduling.decode_gap_ms is not None:
        beside = f"what fits {scheduling.decode_gap_ms:g} ms (--decode-gap-ms)"
    else:
        beside = "what fits three times the decodes' own time, which is learned"
    return (
        f"a step computes up to {scheduling.max_running_requests} requests and {tokens} prompt "
        f"tokens, longer prompts are {cut}; beside decodes: {beside}"
    )
