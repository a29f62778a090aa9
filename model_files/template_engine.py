"""Compiles and renders chat templates in a sandbox, with the helpers that transformers provides.

Called by the front for every chat, and at start by `end_tokens` and `gguf_vocabulary`. Templates
are written for transformers' `apply_chat_template`. Tokenizers must not enter.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ModelError

# Exceptions that a template may raise on messages that it does not support.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateRefusal(ValueError):
    """The template failed on these messages or rejected them; the message says why."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. `special_tokens` (role -> token) become its variables.

        Raises ModelError for a syntax error.
        """
        self.source = source
        self.special_tokens = special_tokens
        self._compiled = _compile(source)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation to text. Raises TemplateRefusal."""
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens}
        try:
            text = self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
            text.encode()
        except _REFUSALS as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return text


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's part for training; renders its body."""

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
    """Encode as JSON without jinja's HTML escapes, as transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
