"""Translate OpenAI bodies to messages or prompts and SamplingParams.

Used by `openai_routes`. Errors raised here use the client's field names; for errors of the front
the `*_names` tables map them back.
"""

import msgspec

from ...wire.client_messages import ChatMessage
from ...wire.sampling import InvalidRequest, SamplingParams
from ..errors import quoted
from ..limits import MAX_CONTENT_PARTS, MAX_MESSAGES
from ..whole_numbers import Number, whole
from .body import BodyReader
from .openai_wire import ChatRequest, CompletionRequest, Message
from .refused_fields import (
    CHAT_ELSEWHERE,
    CHAT_NEUTRAL,
    COMPLETIONS_ELSEWHERE,
    Refusal,
    check_refused,
    refusals,
)
from .sampling_fields import to_sampling

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

chat_reader = BodyReader(
    ChatRequest, refusals(ChatRequest.__struct_fields__, CHAT_ELSEWHERE, CHAT_NEUTRAL)
)
completion_reader = BodyReader(
    CompletionRequest, refusals(CompletionRequest.__struct_fields__, COMPLETIONS_ELSEWHERE)
)
_TOOL_CALLS = Refusal(([],))
_FUNCTION_CALL = Refusal()


def read_chat(body: bytes) -> ChatRequest:
    """Decode a chat body; messages and parts are counted before they are decoded."""
    request = chat_reader.read(body)
    count = len(request.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"messages must be 1 to {MAX_MESSAGES}, got {count}")
    parts = sum(len(m.content) for m in request.messages if isinstance(m.content, list))
    if parts > MAX_CONTENT_PARTS:
        raise InvalidRequest(
            "messages",
            f"messages have {parts} parts of content; at most {MAX_CONTENT_PARTS} are allowed",
        )
    return request


def read_completion(body: bytes) -> CompletionRequest:
    return completion_reader.read(body)


def chat_names(request: ChatRequest) -> dict[str, str]:
    """Map our field names to those that the client used."""
    limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return {
        "input_ids": "messages",
        "text": "messages",
        "prompt": "messages",
        "max_new_tokens": limit,
        "min_new_tokens": "min_tokens",
    }


def completion_names() -> dict[str, str]:
    return {
        "input_ids": "prompt",
        "text": "prompt",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
    }


def chat_sampling(request: ChatRequest) -> SamplingParams:
    old = whole(request.max_tokens, "max_tokens")
    new = whole(request.max_completion_tokens, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_completion_tokens",
            f"max_completion_tokens ({new}) and max_tokens ({old}) contradict each other",
        )
    return _sampling(request, old if new is None else new)


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    return _sampling(request, request.max_tokens)


def _sampling(request: ChatRequest | CompletionRequest, limit: Number | None) -> SamplingParams:
    params = to_sampling(request, max_new_tokens=limit, min_new_tokens=request.min_tokens)
    if request.include_stop_str_in_output:
        return msgspec.structs.replace(params, no_stop_trim=True)
    return params


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    return [
        ChatMessage(
            role=message.role,
            content=_content(message, f"messages[{index}]"),
            name=message.name,
        )
        for index, message in enumerate(messages)
    ]


def _content(message: Message, where: str) -> str:
    """Return the text of a message; text parts are joined by line breaks."""
    for name, raw, refusal in (
        ("tool_calls", message.tool_calls, _TOOL_CALLS),
        ("function_call", message.function_call, _FUNCTION_CALL),
    ):
        if raw:
            check_refused(f"{where}.{name}", bytes(raw), refusal)
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(
            f"{where}.content", f"{where}.content: a {message.role} message needs a content"
        )
    if not content:
        raise InvalidRequest(f"{where}.content", f"{where}.content is an empty list")
    texts = []
    for part in content:
        if part.type != "text":
            raise InvalidRequest(
                f"{where}.content",
                f"{where}.content: parts of type {quoted(part.type)} are not supported, only text",
            )
        if part.text is None:
            raise InvalidRequest(f"{where}.content", f"{where}.content: a text part has no text")
        texts.append(part.text)
    return "\n".join(texts)
