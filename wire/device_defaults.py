"""Sizes of steps that depend on where they are computed. PURE.

Resolved once by each process that runs the model, the one place where these numbers are chosen.
"""

from typing import Literal

import msgspec

from .scheduling_config import SchedulingConfig, SchedulingFlags

DEFAULTS = {
    "cpu": SchedulingConfig(),
    # A step's weights are read once for all rows, and reading them is most of a small step: more
    # rows cost little, and a prompt is computed at full speed in pieces of thousands only.
    "cuda": SchedulingConfig(
        max_running_requests=256, max_prefill_tokens=8192, chunked_prefill_size=8192
    ),
}


def resolve_scheduling(flags: SchedulingFlags, device: Literal["cpu", "cuda"]) -> SchedulingConfig:
    """Flags that were given keep their values; the others get those of the device.

    A chunk that was asked for is not cut down by a default of `max_prefill_tokens`.
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
    """A line for the log: what one step computes at most."""
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
