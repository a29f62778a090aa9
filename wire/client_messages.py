"""Messages between a client and the socket door, in msgpack or JSON. PURE: msgspec only.

    client <--FromClient / ToClient--> front

Requests are maps that refuse unknown keys, so that a misspelt field is an error. The messages
between the processes of a server are in `messages`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .limits import MAX_INPUT_IDS, MAX_MESSAGES
from .sampling import SamplingParams


class _FromClient(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "developer", "tool"]
    content: str
    name: str | None = None


class Generate(_FromClient, frozen=True, tag="generate"):
    """Request with exactly one of text, input_ids and messages; the client chooses `rid`."""

    rid: str
    text: str | None = None
    input_ids: Annotated[list[int], Meta(max_length=MAX_INPUT_IDS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None  # name of a loaded adapter; None: the base model


class Abort(_FromClient, frozen=True, tag="abort"):
    rid: str


class Ping(_FromClient, frozen=True, tag="ping"):
    seq: int = 0


class FlushCache(_FromClient, frozen=True, tag="flush_cache"):
    seq: int = 0
    timeout: float = 0.0  # seconds to wait until nothing runs


class LoadLoRA(_FromClient, frozen=True, tag="load_lora"):
    """Load an adapter; answered by LoRAs once requests can use it, or with the cause of failure."""

    lora_name: str
    lora_path: str
    pinned: bool = False
    seq: int = 0


class UnloadLoRA(_FromClient, frozen=True, tag="unload_lora"):
    lora_name: str
    seq: int = 0


class ListLoRAs(_FromClient, frozen=True, tag="list_loras"):
    seq: int = 0


FromClient = Generate | Abort | Ping | FlushCache | LoadLoRA | UnloadLoRA | ListLoRAs


class _ToClient(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class Usage(_ToClient, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Delta(_ToClient, frozen=True, tag="delta"):
    rid: str
    text: str
    token_ids: list[int] = []


class Done(_ToClient, frozen=True, tag="done"):
    """Terminal message of a request that finished or was aborted by its client."""

    rid: str
    text: str  # all that no Delta has carried: the tail of a stream, else the whole text
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    usage: Usage
    matched_stop: int | str | None = None


class Failed(_ToClient, frozen=True, tag="failed"):
    """Terminal message of a request that was refused or broke; `rid` is empty if unreadable."""

    rid: str
    status: int
    message: str
    param: str | None = None
    retry_after: int | None = None  # seconds
    code: str | None = None  # machine-readable, such as "context_length_exceeded"


class Pong(_ToClient, frozen=True, tag="pong"):
    seq: int
    model: str
    ready: bool
    sampling: SamplingParams | None = None  # defaults recommended by the model's files


class Flushed(_ToClient, frozen=True, tag="flushed"):
    """Reply to FlushCache; `status` is an HTTP status, `message` says why nothing was flushed."""

    seq: int
    status: int
    message: str = ""
    pages: int = 0


class LoRAs(_ToClient, frozen=True, tag="loras"):
    """Reply to LoadLoRA, UnloadLoRA and ListLoRAs; `names` lists the adapters that requests may
    use.

    `status` is an HTTP status; if it is not 200, `message` says why nothing changed.
    """

    seq: int
    status: int
    message: str = ""
    names: list[str] = []


ToClient = Delta | Done | Failed | Pong | Flushed | LoRAs
