"""From an OpenAI body to what the front takes: messages or prompts, and SamplingParams.

Complaints of this file use the client's field names; those of the front get them back through the
`*_names` tables.
"""

import msgspec

from ...wire.client_messages import ChatMessage
from ...wire.sampling import InvalidRequest, SamplingParams
from .body import decode, parse_fields, refuse_unsupported
from .openai_wire import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Message,
)
from .sampling_fields import to_sampling

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def read_chat(body: bytes) -> ChatRequest:
    refuse_unsupported(parse_fields(body), CHAT_UNSUPPORTED)
    return decode(body, _chat_decoder)


def read_completion(body: bytes) -> CompletionRequest:
    refuse_unsupported(parse_fields(body), COMPLETION_UNSUPPORTED)
    return decode(body, _completion_decoder)


def chat_names(request: ChatRequest) -> dict[str, str]:
    """Our field names -> those of this client."""
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
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_completion_tokens",
            f"max_completion_tokens ({new}) and max_tokens ({old}) contradict each other",
        )
    return _sampling(request, old if new is None else new)


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    return _sampling(request, request.max_tokens)


def _sampling(request: ChatRequest | CompletionRequest, limit: int | None) -> SamplingParams:
    params = to_sampling(request, max_new_tokens=limit, min_new_tokens=request.min_tokens)
    if request.include_stop_str_in_output:
        return msgspec.structs.replace(params, no_stop_trim=True)
    return params


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    if not messages:
        raise InvalidRequest("messages", "messages is an empty list")
    return [
        ChatMessage(
            role=message.role,
            content=_content(message, f"messages[{index}]"),
            name=message.name,
        )
        for index, message in enumerate(messages)
    ]


def _content(message: Message, where: str) -> str:
    """The text of a message; text parts are joined by line breaks."""
    if message.tool_calls or message.function_call not in (None, msgspec.Raw(b"null")):
        raise InvalidRequest(f"{where}.tool_calls", f"{where}: tool calls are not supported")
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
                f"{where}.content: parts of type {part.type!r} are not supported, only text",
            )
        if part.text is None:
            raise InvalidRequest(f"{where}.content", f"{where}.content: a text part has no text")
        texts.append(part.text)
    return "\n".join(texts)
