"""Structs of the OpenAI API: requests and answers of /v1/chat/completions and /v1/completions.

Requests are typed and ignore unknown fields; `refused_fields` lists known fields that are refused.
Translation is in `openai_requests`, rendering in `openai_answers`.
"""

from typing import Literal

import msgspec

from ..whole_numbers import Number
from .sampling_fields import SamplingFields


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(SamplingFields, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: Number | None = None
    min_tokens: Number | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name for no_stop_trim
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None  # SGLang's name for the id of the answer
    priority: Number | None = None
    user: str | None = None
    cache_salt: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "developer", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()


class ChatRequest(_Request, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Number | None = None


class CompletionRequest(_Request, frozen=True, kw_only=True):
    prompt: msgspec.Raw  # see body.read_prompt


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class TextChoice(msgspec.Struct, frozen=True):
    """A choice of /v1/completions, whole or a chunk of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    matched_stop: int | str | None
    logprobs: None = None


Choice = ChatChunkChoice | TextChoice | ChatChoice


class Answer(msgspec.Struct, frozen=True):
    """A whole answer or one chunk, of either route; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "tokenloom"
    parent: str | None = None  # of an adapter: the base model


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
