"""Flags of scheduling, a group of ServerConfig, before and after device defaults apply. PURE.

See config.py for how fields become flags.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SchedulePolicy = Literal["fcfs", "lpm", "dfs-weight", "hrrn", "priority"]
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "priority", "cost"]
RunningRequests = Annotated[int, Meta(ge=1, le=4096)]
PrefillTokens = Annotated[int, Meta(ge=1)]
ChunkSize = Annotated[int, Meta(ge=0)]


class SchedulingFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags as given; None depends on the device and is resolved by `device_defaults`."""

    max_running_requests: Annotated[
        RunningRequests | None,
        Meta(
            description="requests computed at the same time; default: 64, on a CUDA device 256",
            extra={"aliases": ["--max-num-seqs"]},
        ),
    ] = None
    max_prefill_tokens: Annotated[
        PrefillTokens | None,
        Meta(
            description="prompt tokens computed in one step at most, where prompts are not cut; "
            "default: 4096, or the chunk where that is larger",
            extra={"aliases": ["--max-num-batched-tokens"]},
        ),
    ] = None
    chunked_prefill_size: Annotated[
        ChunkSize | None,
        Meta(
            description="prompt tokens computed in one step at most; longer prompts are cut; "
            "0: prompts are never cut; default: 512, on a CUDA device 8192",
        ),
    ] = None
    decode_gap_ms: Annotated[
        Annotated[float, Meta(gt=0.0, le=60_000.0)] | None,
        Meta(
            description="milliseconds that a step may take which computes prompts beside running "
            "answers; default: three times what these would take alone, at least 20",
        ),
    ] = None
    mixed_chunk_size: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="token budget of a step that also decodes, in place of --decode-gap-ms; "
            "0: no bound of its own; default: learned from how long steps take",
        ),
    ] = None
    page_size: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="tokens in a KV page",
            extra={"aliases": ["--block-size"]},
        ),
    ] = 16
    schedule_conservativeness: Annotated[
        float, Meta(gt=0.0, description="above 1: fewer admissions and fewer retractions")
    ] = 1.0
    disable_radix_cache: Annotated[bool, Meta(description="no prefix reuse between requests")] = (
        False
    )
    schedule_policy: Annotated[
        SchedulePolicy, Meta(description="which waiting request starts next")
    ] = "fcfs"
    low_priority_first: Annotated[
        bool, Meta(description="smaller priorities go before larger ones")
    ] = False
    max_overtakes: Annotated[
        int,
        Meta(
            ge=0,
            description="later arrivals that may start before a waiting request; then it goes "
            "first, whatever the policy (but priority)",
        ),
    ] = 256
    prefix_group_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a waiting request lets another one compute a prompt prefix that they "
            "share from so many tokens on; 0: never",
        ),
    ] = 64
    max_skips: Annotated[
        int,
        Meta(
            ge=0,
            description="requests that may start before one that is next and does not fit the "
            "pool; then the pool is held for it",
        ),
    ] = 16
    lookahead: Annotated[
        int,
        Meta(ge=0, description="requests tried in one step behind one that does not fit"),
    ] = 16
    fairness: Annotated[
        Literal["none", "vtc"],
        Meta(description="vtc: tenants get equal shares, counted in tokens"),
    ] = "none"
    vtc_output_weight: Annotated[
        float,
        Meta(
            gt=0.0, description="with --fairness vtc: what an answer's token counts, a prompt's 1"
        ),
    ] = 2.0
    eviction_policy: Annotated[
        EvictionPolicy,
        Meta(
            description="which cached prefix goes first when pages are needed",
            extra={"aliases": ["--radix-eviction-policy"]},
        ),
    ] = "lru"
    kv_events: Annotated[
        str | None,
        Meta(description="address where changes of the prefix cache are published"),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        Meta(description="address where published changes can be asked for again"),
    ] = None
    preemption_threshold: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="a request that comes next and does not fit retracts running ones whose "
            "priority is lower by at least this; default: never"
        ),
    ] = None
    max_waiting_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that wait at most; more get 503; default: no bound"),
    ] = None
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="prompt tokens that wait at most; more get 503; default: no bound"),
    ] = None
    queue_timeout: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        Meta(description="seconds until a request must have started, else 503; default: no bound"),
    ] = None
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0.0)] | None,
        Meta(description="seconds until a request must have ended, else 408; default: no bound"),
    ] = None


class SchedulingConfig(SchedulingFlags, frozen=True, kw_only=True):
    """SchedulingFlags with every size resolved; the defaults are those of a CPU."""

    max_running_requests: RunningRequests = 64
    max_prefill_tokens: PrefillTokens = 4096
    chunked_prefill_size: ChunkSize = 512


def contradiction(scheduling: SchedulingFlags) -> str | None:
    """Return why valid flags contradict each other, with their values; None if they agree."""
    page = scheduling.page_size
    for flag, tokens in (
        ("--chunked-prefill-size", scheduling.chunked_prefill_size or page),
        ("--max-prefill-tokens", scheduling.max_prefill_tokens or page),
    ):
        if tokens < page:
            return f"{flag} {tokens} is less than one page (--page-size {page})"
    if scheduling.decode_gap_ms is not None:
        flag = f"--decode-gap-ms {scheduling.decode_gap_ms:g}"
        if scheduling.mixed_chunk_size is not None:
            return f"{flag} bounds the same as --mixed-chunk-size: give one of them"
        if scheduling.chunked_prefill_size == 0:
            return f"{flag} needs prompts that may be cut: not with --chunked-prefill-size 0"
    policy = scheduling.schedule_policy
    if scheduling.disable_radix_cache and policy in ("lpm", "dfs-weight"):
        return (
            f"--schedule-policy {policy} orders by cached prefixes: not with --disable-radix-cache"
        )
    if scheduling.kv_events_replay and not scheduling.kv_events:
        return "--kv-events-replay has nothing to replay without --kv-events"
    if scheduling.disable_radix_cache:
        if scheduling.eviction_policy != "lru":
            return f"--eviction-policy {scheduling.eviction_policy} with --disable-radix-cache"
        if scheduling.kv_events:
            return "--kv-events has nothing to publish with --disable-radix-cache"
    return None
