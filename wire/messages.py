"""Every struct that crosses a border between processes, one tagged union per link. PURE.

    front --ToScheduler--> scheduler --ToDetokenizer--> detokenizer --ToFront--> front
    scheduler --ToFront--> front                    (LoopStamp alone)
    detokenizer --ToScheduler--> scheduler          (a stop string was found)
    children --ToLauncher--> launcher               (ready, failed)
    launcher --ToFront--> front                     (another child died)

All answers of the scheduler, control replies too, pass through the detokenizer, so the front gets
them in the order in which they were sent. Internal structs are arrays on the wire and may only grow
at the end. The messages of the socket door are in `client_messages`.
"""

from typing import Literal

import msgspec

from .sampling import SamplingParams


class _Internal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class _Value(msgspec.Struct, frozen=True, array_like=True):
    pass


# Values inside messages:


class Finish(_Value, frozen=True):
    """Why a request ended; all reasons but stop and length carry a message and an HTTP status."""

    reason: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None  # the stop token id or stop string
    message: str = ""
    status: int = 200
    retry_after: int | None = None  # seconds; set with a 503 that a retry may avoid


class StreamOpen(_Value, frozen=True):
    """Settings that the detokenizer needs for a request, sent with the request's first row."""

    prompt_tail: bytes  # the last few prompt ids as int32: context for the first word's spacing
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    min_new_tokens: int = 0  # stop strings are ignored within so many tokens


class SchedulerInfo(_Value, frozen=True):
    """Model facts and limits, fixed at start-up, for the front's checks and /get_server_info."""

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
    """One load of an adapter; loading the same name again makes another `lora_id`."""

    lora_id: int  # never reused; 0 is the base model
    name: str
    path: str  # a local directory, resolved and allowed by the front
    pinned: bool = False  # never evicted to make room for another


# Front -> scheduler:


class TokenizedGenerateReq(_Internal, frozen=True):
    rid: int
    input_ids: bytes  # int32, little-endian
    sampling: SamplingParams  # seed is filled in by the front
    priority: int = 0  # larger first
    tenant: str = ""  # queue and compute are shared fairly between tenants
    namespace: str = ""  # requests share cached prefixes only within a namespace
    lora_id: int = 0  # of a loaded adapter; 0: the base model


class AbortReq(_Internal, frozen=True):
    rid: int


class StopMatched(_Internal, frozen=True):
    """Detokenizer to scheduler: the text of `rid` contains a stop string; finish the request."""

    rid: int


class StatsReq(_Internal, frozen=True):
    seq: int


class DrainReq(_Internal, frozen=True):
    """Admit nothing new, refuse waiting requests (503), finish running ones, then send Drained."""

    timeout_s: float | None = None  # running requests end with a 503 after it; None: never


class FlushReq(_Internal, frozen=True):
    """Evict all cached prefixes once no request runs or waits; always answered by FlushOut."""

    seq: int
    timeout_s: float = 0.0  # time to wait until idle; 0: refuse unless idle now


class LoadLoRAReq(_Internal, frozen=True):
    """Read and check an adapter while serving continues; always answered by LoRALoaded."""

    ref: LoRARef


class UnloadLoRAReq(_Internal, frozen=True):
    """Free a loaded adapter after the last request that names it; answered by LoRAUnloaded.

    The front sends it once, and only for adapters that LoRALoaded reported as loaded.
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
    """One request's output of a step; the row with `finish` is the last one of its rid."""

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
    """Snapshot between two steps; token counts are KV tokens, totals count from the start."""

    seq: int
    step: int
    running: int
    waiting: int
    used_tokens: int  # held by requests or locked in the prefix tree
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
    detokenizer_strays_total: int = 0  # messages and frames dropped by the detokenizer


class FlushOut(_Internal, frozen=True):
    seq: int
    ok: bool
    message: str = ""  # why not
    pages: int = 0  # evicted


class LoRALoaded(_Internal, frozen=True):
    """Reply to LoadLoRAReq; if not `ok`, nothing is kept, `status` is an HTTP status (400, 404)."""

    lora_id: int
    ok: bool
    message: str = ""  # why not
    status: int = 200
    rank: int = 0  # largest over the adapter's layers


class LoRAUnloaded(_Internal, frozen=True):
    lora_id: int


class Drained(_Internal, frozen=True):
    pass


class Draining(_Internal, frozen=True):
    """A drain has begun; receivers drop a Drained that comes without it."""


class LoopStamp(_Internal, frozen=True):
    """State of the scheduler's loop, sent once a second: directly and through the detokenizer."""

    turns: int  # loop turns begun so far
    waiting: bool  # blocked on the mailbox, nothing to compute
    tokens: int  # in the step launched last
    cpu_s: float  # processor time of the scheduler process so far
    relayed: bool  # sent through the detokenizer


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
    """Text and ids ready for the client; text may lag behind ids until the last row."""

    rid: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


class BatchStrOut(_Internal, frozen=True):
    rows: list[StrOut]


# Launcher -> front:


class ChildDied(_Internal, frozen=True):
    """Another process of the server died: end every stream with an error, then exit."""

    name: str
    how: str  # its exit status or signal in words


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
