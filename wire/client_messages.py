"""What a client and the socket door say to each other, in msgpack or JSON. PURE: msgspec only.

    client <--FromClient / ToClient--> front

Maps that refuse unknown keys, so that a misspelt field is an error. Between the processes of a
server other structs travel: `messages`.
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
    """Exactly one of text, input_ids and messages. `rid` is the client's own name for it."""

    rid: str
    text: str | None = None
    input_ids: Annotated[list[int], Meta(max_length=MAX_INPUT_IDS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    priority: int = 0
    user: str | None = None
    cache_salt: str | None = None
    lora_path: str | None = None  # the name of an adapter; None: the base model


class Abort(_FromClient, frozen=True, tag="abort"):
    rid: str


class Ping(_FromClient, frozen=True, tag="ping"):
    seq: int = 0


class FlushCache(_FromClient, frozen=True, tag="flush_cache"):
    seq: int = 0
    timeout: float = 0.0  # seconds to wait until nothing runs


class LoadLoRA(_FromClient, frozen=True, tag="load_lora"):
    """Answered by LoRAs when requests can use it, or with the reason why not."""

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
    """The terminal message of a request that ended well or was aborted by its client."""

    rid: str
    text: str  # what no Delta carried yet: the tail of a stream, the whole text otherwise
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    usage: Usage
    matched_stop: int | str | None = None


class Failed(_ToClient, frozen=True, tag="failed"):
    """The terminal message of a request that was refused or broke; `rid` is empty if unread."""

    rid: str
    status: int
    message: str
    param: str | None = None
    retry_after: int | None = None  # seconds
    code: str | None = None  # for clients that act on it, such as "context_length_exceeded"


class Pong(_ToClient, frozen=True, tag="pong"):
    seq: int
    model: str
    ready: bool
    sampling: SamplingParams | None = None  # what the model's files recommend


class Flushed(_ToClient, frozen=True, tag="flushed"):
    """`status` is an HTTP status: 200, or why nothing was flushed."""

    seq: int
    status: int
    message: str = ""
    pages: int = 0


class LoRAs(_ToClient, frozen=True, tag="loras"):
    """`status` is an HTTP status: 200, or why nothing changed. `names` can be asked for now."""

    seq: int
    status: int
    message: str = ""
    names: list[str] = []


ToClient = Delta | Done | Failed | Pong | Flushed | LoRAs
