"""Every struct that crosses a border between processes, one tagged union per link. PURE.

    front --ToScheduler--> scheduler --ToDetokenizer--> detokenizer --ToFront--> front
    scheduler --ToFront--> front                    (LoopStamp alone)
    detokenizer --ToScheduler--> scheduler          (a stop string was found)
    children --ToLauncher--> launcher               (ready, failed)
    launcher --ToFront--> front                     (another child died)

All answers of the scheduler travel through the detokenizer, control replies too, so the front sees
them in the order in which they were said. Internal structs are arrays on the wire and may only grow
at the end. What clients of the socket door say and hear is in `client_messages`.
"""

from typing import Literal

import msgspec

from .sampling import SamplingParams


class _Internal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class _Value(msgspec.Struct, frozen=True, array_like=True):
    pass


# What messages carry:


class Finish(_Value, frozen=True):
    """Why a request ended. Anything but stop and length carries a message and an HTTP status."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None  # the stop token id or stop string
    message: str = ""
    status: int = 200
    retry_after: int | None = None  # seconds; with a 503 that may be different soon


class StreamOpen(_Value, frozen=True):
    """What the detokenizer must know of a request; rides on the request's first row."""

    prompt_tail: bytes  # the last few prompt ids as int32: context for the first word's spacing
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    min_new_tokens: int = 0  # stop strings do not count before the token after so many


class SchedulerInfo(_Value, frozen=True):
    """Facts and limits fixed at start-up, for the front's door checks and for /get_server_info."""

    vocab_size: int
    context_length: int
    page_size: int
    max_total_tokens: int  # KV pool capacity in tokens
    max_running_requests: int
    chunked_prefill_size: int  # 0: off
    dtype: str
    eos_token_ids: tuple[int, ...]
    kv_events: str | None = None  # where changes of the prefix cache are published
    kv_events_replay: str | None = None


class LoRARef(_Value, frozen=True):
    """One load of an adapter. A name that is loaded again gets another `lora_id`."""

    lora_id: int  # never used twice; 0 is the base model and no adapter
    name: str
    path: str  # a local directory, resolved and allowed by the front
    pinned: bool = False  # never evicted to make room for another


# Front -> scheduler:


class TokenizedGenerateReq(_Internal, frozen=True):
    rid: int
    input_ids: bytes  # int32, little-endian
    sampling: SamplingParams  # seed is filled in by the front
    priority: int = 0  # larger first
    tenant: str = ""  # who asks: shares of the machine are fair between tenants
    namespace: str = ""  # cached prefixes are shared within one only
    lora_id: int = 0  # the adapter, loaded before; 0: the base model


class AbortReq(_Internal, frozen=True):
    rid: int


class StopMatched(_Internal, frozen=True):
    """From the detokenizer: the text of `rid` met a stop string, no more tokens are wanted."""

    rid: int


class StatsReq(_Internal, frozen=True):
    seq: int


class DrainReq(_Internal, frozen=True):
    """Start nothing new, refuse what waits (503), finish what runs, then say Drained and exit."""

    timeout_s: float | None = None  # what runs longer ends with an error (503); None: nothing does


class FlushReq(_Internal, frozen=True):
    """Forget all cached prefixes, once nothing runs or waits; answered by FlushOut in any case."""

    seq: int
    timeout_s: float = 0.0  # how long to wait for that moment; 0: it must be now


class LoadLoRAReq(_Internal, frozen=True):
    """Read and check an adapter while serving goes on; answered by LoRALoaded in any case."""

    ref: LoRARef


class UnloadLoRAReq(_Internal, frozen=True):
    """No request will name this adapter again: free it after the last one that did has ended.

    Answered by LoRAUnloaded then. Sent for adapters that LoRALoaded said are there, and once.
    """

    lora_id: int


ToScheduler = (
    TokenizedGenerateReq
    | AbortReq
    | StopMatched
    | StatsReq
    | DrainReq
    | FlushReq
    | LoadLoRAReq
    | UnloadLoRAReq
)


# Scheduler -> detokenizer:


class TokenIDOut(_Value, frozen=True):
    """One request's share of a step. The row with `finish` is the last one of its rid."""

    rid: int
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0
    opened: StreamOpen | None = None


class BatchTokenIDOut(_Internal, frozen=True):
    rows: list[TokenIDOut]


class SchedulerReady(_Internal, frozen=True):
    info: SchedulerInfo


class StatsOut(_Internal, frozen=True):
    """A snapshot between two steps; token counts are KV tokens, totals run since the start."""

    seq: int
    step: int
    running: int
    waiting: int
    used_tokens: int  # held by requests or locked in the tree
    evictable_tokens: int
    free_tokens: int
    free_rows: int
    new_token_ratio: float
    retractions_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    violations_total: int  # failed conservation checks; anything but 0 is a bug
    evicted_pages_total: int = 0
    tree_nodes: int = 0
    tree_pages: int = 0  # in the prefix tree, locked ones included
    detokenizer_strays_total: int = 0  # messages and frames that the detokenizer dropped


class FlushOut(_Internal, frozen=True):
    seq: int
    ok: bool
    message: str = ""  # why not
    pages: int = 0  # that were forgotten


class LoRALoaded(_Internal, frozen=True):
    """If not `ok`, nothing of the adapter is kept; `status` is then an HTTP status (400, 404)."""

    lora_id: int
    ok: bool
    message: str = ""  # why not
    status: int = 200
    rank: int = 0  # the largest of the adapter


class LoRAUnloaded(_Internal, frozen=True):
    lora_id: int


class Drained(_Internal, frozen=True):
    pass


class Draining(_Internal, frozen=True):
    """A drain has begun; without it a Drained is not believed."""


class LoopStamp(_Internal, frozen=True):
    """What the scheduler's loop is doing, once a second: one stamp to the front, and one by way of
    the detokenizer, so that its silence shows as well.
    """

    turns: int  # that the loop has begun
    waiting: bool  # for messages: there is nothing to compute
    tokens: int  # of the step launched last
    cpu_s: float  # processor time of the scheduler process so far
    relayed: bool  # through the detokenizer


ToDetokenizer = (
    BatchTokenIDOut
    | SchedulerReady
    | StatsOut
    | Drained
    | FlushOut
    | LoRALoaded
    | LoRAUnloaded
    | LoopStamp
    | Draining
)


# Detokenizer -> front:


class StrOut(_Value, frozen=True):
    """Text and ids that became deliverable; text may lag behind ids until the last row."""

    rid: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


class BatchStrOut(_Internal, frozen=True):
    rows: list[StrOut]


# Launcher -> front:


class ChildDied(_Internal, frozen=True):
    """Another process of the server ended unasked: tell every client, then end as well."""

    name: str
    how: str  # in words


ToFront = (
    BatchStrOut
    | SchedulerReady
    | StatsOut
    | Drained
    | FlushOut
    | LoRALoaded
    | LoRAUnloaded
    | ChildDied
    | LoopStamp
)


# Children -> launcher:


class ChildReady(_Internal, frozen=True):
    name: str
    detail: str = ""  # for the front: the URL it serves


class ChildFailed(_Internal, frozen=True):
    name: str
    message: str


ToLauncher = ChildReady | ChildFailed
