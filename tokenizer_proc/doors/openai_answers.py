"""Rendering of the OpenAI routes: rows of a stream become chunks or one whole answer.

A `Renderer` belongs to one HTTP request, a `Choice` to one prompt of it. Clients depend on the
order of a stream: role first, content, the chunk with finish_reason, usage, [DONE].
"""

import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from ...wire.messages import Finish, StrOut
from .asgi import event
from .openai_wire import (
    Answer,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    PromptDetails,
    TextChoice,
    Usage,
)
from .tally import Tally

Route = Literal["chat", "completion"]
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_WHOLE = {"chat": "chat.completion", "completion": "text_completion"}
_CHUNK = {"chat": "chat.completion.chunk", "completion": "text_completion"}


def usage_of(tallies: Sequence[Tally]) -> Usage:
    prompt = sum(tally.prompt_tokens for tally in tallies)
    completion = sum(tally.completion_tokens for tally in tallies)
    cached = sum(tally.cached_tokens for tally in tallies)
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


class Renderer:
    def __init__(
        self,
        route: Route,
        model: str,
        rid: str | None = None,
        *,
        include_usage: bool = False,
        every_usage: bool = False,
    ) -> None:
        """Take `rid`, the client's id for the answer, if it sent one."""
        self._route = route
        self._model = model
        self._id = rid or _ID_PREFIX[route] + secrets.token_hex(16)
        self._created = int(time.time())
        self._include_usage = include_usage
        self._every_usage = every_usage

    def whole(self, tallies: Sequence[Tally]) -> Answer:
        choices = [self._whole_choice(index, tally) for index, tally in enumerate(tallies)]
        return self._answer(_WHOLE[self._route], choices, usage_of(tallies))

    def frames(self, index: int, tally: Tally, row: StrOut) -> bytes:
        """Return the events of one row, which `tally` has counted; empty if it has no output."""
        pieces: list[Choice] = []
        if self._route == "chat":
            if tally.rows == 1:
                pieces.append(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
            if row.text:
                pieces.append(ChatChunkChoice(index, ChatDelta(content=row.text)))
            if row.finish is not None:
                pieces.append(ChatChunkChoice(index, ChatDelta(), None, *_ending(row.finish)))
        elif row.finish is not None:
            pieces.append(TextChoice(index, row.text, None, *_ending(row.finish)))
        elif row.text:
            pieces.append(TextChoice(index, row.text))
        return b"".join(self._chunk([piece], self._usage_so_far(tally)) for piece in pieces)

    def last_frames(self, tallies: Sequence[Tally]) -> bytes:
        """Return the events between the last choice and [DONE]."""
        return self._chunk([], usage_of(tallies)) if self._include_usage else b""

    def _usage_so_far(self, tally: Tally) -> Usage | msgspec.UnsetType | None:
        if self._every_usage:
            return usage_of([tally])
        # With include_usage OpenAI's chunks all have the field, null in all but the last.
        return None if self._include_usage else msgspec.UNSET

    def _chunk(self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        return event(self._answer(_CHUNK[self._route], choices, usage))

    def _answer(
        self, object_: str, choices: list[Choice], usage: Usage | msgspec.UnsetType | None
    ) -> Answer:
        return Answer(self._id, object_, self._created, self._model, choices, usage)

    def _whole_choice(self, index: int, tally: Tally) -> Choice:
        reason, matched = _ending(tally.ended)
        if self._route == "chat":
            return ChatChoice(index, AnswerMessage(tally.text), reason, matched)
        return TextChoice(index, tally.text, None, reason, matched)


def _ending(finish: Finish) -> tuple[str, int | str | None]:
    return finish.reason, finish.matched
