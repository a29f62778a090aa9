"""The structs of the OpenAI API: what /v1/chat/completions and /v1/completions take and give.

Requests are typed and lenient towards unknown fields; `*_UNSUPPORTED` lists those that we know and
refuse unless they ask for nothing. Translation is in `openai_requests`, rendering in
`openai_answers`.
"""

from typing import Literal

import msgspec

from .body import Neutral
from .sampling_fields import SamplingFields


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(SamplingFields, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name for no_stop_trim
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None  # SGLang's name for the id of the answer
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant", "developer", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None


class ChatRequest(_Request, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionRequest(_Request, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]


_OFF = (False,)
_EMPTY: tuple[object, ...] = ([],)
_NEVER: tuple[object, ...] = ()

_UNSUPPORTED: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": _OFF,
    "length_penalty": (1, 1.0),
    "top_logprobs": (0,),
    "prompt_logprobs": _NEVER,
    "logprob_token_ids": _EMPTY,
    "response_format": ({"type": "text"},),
    "json_schema": _NEVER,
    "regex": _NEVER,
    "ebnf": _NEVER,
    "structural_tag": _NEVER,
    "structured_outputs": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "stop_regex": (*_EMPTY, ""),
    "bad_words": _EMPTY,
    "allowed_token_ids": _EMPTY,
    "logits_processors": _EMPTY,
    "custom_logit_processor": _NEVER,
    "custom_params": ({},),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": _NEVER,
    "lora_path": _NEVER,
    "session_params": ({},),
    "extra_key": _NEVER,
    "return_hidden_states": _OFF,
    "return_token_ids": _OFF,
}

CHAT_UNSUPPORTED: Neutral = {
    **_UNSUPPORTED,
    "logprobs": _OFF,
    "echo": _OFF,
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": _NEVER,
    "web_search_options": _NEVER,
    "documents": _EMPTY,
    "chat_template": _NEVER,
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": _OFF,
    "add_special_tokens": _OFF,
}

COMPLETION_UNSUPPORTED: Neutral = {
    **_UNSUPPORTED,
    "logprobs": _OFF,
    "echo": _OFF,
    "suffix": ("",),
    "prompt_embeds": _NEVER,
    "add_special_tokens": (True,),
}


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
    """A choice of /v1/completions, whole or one piece of a stream."""

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
    """A whole answer, or one chunk of a stream, of either route; `object` tells which."""

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
