"""Chat messages to token ids, through the model's own chat template.

Called by the front with messages that the doors have bounded in size. Templates are rendered in a
sandbox with the helpers that transformers gives them (its `apply_chat_template` is the standard
that templates are written for), and nothing that a client writes can spell a special token: see
`content_guard`.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..model_files.errors import ModelError
from ..model_files.tokenizer import text_ids
from ..wire.messages import ChatMessage
from ..wire.sampling import InvalidRequest
from .content_guard import ContentGuard, Cover, StandInsExhausted

MAX_MESSAGES = 256

# What a template may raise on messages it was not made for.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatRenderer:
    def __init__(
        self, tokenizer: Tokenizer, template: str | None, special_tokens: dict[str, str]
    ) -> None:
        """`special_tokens`: role -> token, as variables of the template. Raises ModelError."""
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._guard = ContentGuard(tokenizer)
        self._source = template or ""
        self._template = _compile(template) if template is not None else None
        # What a model writes in its own turn and its template takes apart again, such as <think>.
        self._own_marks = {t for t in self._guard.plain_literals() if t in self._source}

    def encode(self, messages: list[ChatMessage]) -> list[int]:
        """Ids of the conversation and of the opening of the assistant's answer.

        The template alone decides on BOS. Raises InvalidRequest for "messages".
        """
        if self._template is None:
            raise InvalidRequest("messages", "the model has no chat template; send a plain prompt")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                "messages", f"messages must be 1 to {MAX_MESSAGES}, got {len(messages)}"
            )
        cover = Cover(lambda: self._characters(messages))
        try:
            covered = [self._covered(message, cover) for message in messages]
            ids = self._ids(self._render(self._template, covered), cover)
        except StandInsExhausted as error:
            raise InvalidRequest("messages", str(error)) from error
        if not ids:
            raise InvalidRequest("messages", "the chat template makes nothing of these messages")
        return ids

    def _render(self, template: jinja2.Template, messages: list[dict[str, str]]) -> str:
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        try:
            text = template.render(messages=messages, add_generation_prompt=True, **variables)
            text.encode()
        except _REFUSALS as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the chat template refuses: {reason}") from error
        return text

    def _ids(self, text: str, cover: Cover) -> list[int]:
        if cover.used:
            return self._guard.encode(text, cover)
        return text_ids(self._tokenizer, text)

    def _covered(self, message: ChatMessage, cover: Cover) -> dict[str, str]:
        allowed = self._own_marks if message.role == "assistant" else ()
        content = self._guard.cover(message.content, cover, allowed)
        # The role is one of a few words, and templates build tokens of it: "<|" + role + "|>".
        fields = {"role": message.role, "content": content}
        if message.name is not None:
            fields["name"] = self._guard.cover(message.name, cover)
        return fields

    def _characters(self, messages: list[ChatMessage]) -> set[str]:
        fixed = (self._source, *self._special_tokens.values())
        return set().union(*fixed, *(m.content + (m.name or "") for m in messages))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # the attribute is the library's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the model's chat template is broken: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,  # noqa: ANN401  # any JSON value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, this does not escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
