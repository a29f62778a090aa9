"""Targets of load: an OpenAI-compatible server over HTTP, or tokenloom's socket door.

`load` calls `ask`; each target fills in the request's Record as pieces arrive and classifies
errors. When and what to ask is decided elsewhere.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import msgspec

from ..client import AsyncClient, ClientError, RequestRefused, RequestTimeout, ServerGone
from .http_stream import Disconnected, HttpClient
from .summary import Record

PATH = "/v1/completions"


class RequestFailed(Exception):
    """A request failed; errors are counted by `kind`, the message has details."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True)
class Reply:
    """Answer to a request; `token_ids` is None if the server sends only text."""

    text: str
    token_ids: list[int] | None


class Target(Protocol):
    async def ask(self, prompt: Sequence[int], record: Record) -> Reply:
        """Fill in `record` while the answer streams. Raises RequestFailed."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Dialect:
    """Request fields of a server beside model, prompt and max_tokens.

    `fields` must make answers greedy and of full length; `decode` turns ids into a text prompt for
    servers that take no ids.
    """

    fields: dict[str, Any] = field(
        default_factory=lambda: {"ignore_eos": True, "stream_options": {"include_usage": True}}
    )
    decode: Callable[[Sequence[int]], str] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


_NULL = msgspec.Raw(b"null")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL  # an object or a string


_decoder = msgspec.json.Decoder(_Chunk)


class HttpTarget:
    def __init__(self, client: HttpClient, model: str, dialect: Dialect | None = None) -> None:
        self._client = client
        self._model = model
        self._dialect = dialect or Dialect()

    async def ask(self, prompt: Sequence[int], record: Record) -> Reply:
        body = msgspec.json.encode(self._request(prompt, record.asked_tokens))
        answer = _StreamedAnswer(record)
        record.sent = time.perf_counter()
        try:
            response = await self._client.post(PATH, body, answer.take)
        except Disconnected as error:
            raise RequestFailed("disconnected", str(error)) from error
        except OSError as error:
            raise RequestFailed("no connection", str(error)) from error
        except ValueError as error:  # msgspec's errors are such too
            raise RequestFailed("unreadable answer", str(error)) from error
        if response.status != 200:
            said = response.body.decode(errors="replace")
            raise RequestFailed(f"HTTP {response.status}", said[:500])
        if not answer.finished:
            raise RequestFailed("cut short", "the stream ended with neither usage nor [DONE]")
        if not record.completion_tokens:  # a server that counts nothing: a piece is a token
            record.prompt_tokens, record.completion_tokens = len(prompt), len(record.text_times)
        return Reply("".join(answer.text), None)

    async def aclose(self) -> None:
        self._client.close()

    def _request(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        decode = self._dialect.decode
        return {
            "model": self._model,
            "prompt": decode(prompt) if decode else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            **self._dialect.fields,
        }


class _StreamedAnswer:
    """Reads the chunks of one answer into its record."""

    def __init__(self, record: Record) -> None:
        self.text: list[str] = []
        self.finished = False
        self._record = record

    def take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        chunk = _decoder.decode(payload)
        if chunk.error != _NULL:
            raise RequestFailed("error in stream", bytes(chunk.error).decode()[:500])
        for choice in chunk.choices:
            if choice.text:
                self.text.append(choice.text)
                self._record.text_times.append(now)
        if chunk.usage is not None:
            self._note(chunk.usage)

    def _note(self, usage: _Usage) -> None:
        # The last usage is the whole one; some servers send one with every chunk.
        self.finished = True
        details = usage.prompt_tokens_details
        self._record.prompt_tokens = usage.prompt_tokens
        self._record.completion_tokens = usage.completion_tokens
        self._record.cached_tokens = (details and details.cached_tokens) or 0


class SocketTarget:
    """The socket door of a tokenloom server, through our client.

    Requests name the `adapters` in turn; None is the base model.
    """

    def __init__(self, client: AsyncClient, adapters: Sequence[str | None] = (None,)) -> None:
        self._client = client
        self._adapters = cycle(adapters)

    async def ask(self, prompt: Sequence[int], record: Record) -> Reply:
        answer = self._client.generate(
            input_ids=prompt,
            max_new_tokens=record.asked_tokens,
            temperature=0.0,
            ignore_eos=True,
            lora_path=next(self._adapters),
        )
        record.sent = time.perf_counter()
        try:
            async for delta in answer:
                if delta.text:
                    record.text_times.append(time.perf_counter())
        except RequestRefused as error:
            raise RequestFailed(f"status {error.status}", str(error)) from error
        except RequestTimeout as error:
            raise RequestFailed("timeout", str(error)) from error
        except ServerGone as error:
            raise RequestFailed("disconnected", str(error)) from error
        except ClientError as error:
            raise RequestFailed("unreadable answer", str(error)) from error
        if answer.usage is None:
            raise RequestFailed("cut short", f"it ended with {answer.finish_reason}")
        record.prompt_tokens = answer.usage.prompt_tokens
        record.completion_tokens = answer.usage.completion_tokens
        record.cached_tokens = answer.usage.cached_tokens
        return Reply(answer.text, answer.token_ids)

    async def aclose(self) -> None:
        await self._client.aclose()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(client: HttpClient) -> str:
    """Return the first model that a server lists. Raises OSError, or ValueError if none."""
    answer = await client.get("/v1/models")
    if answer.status != 200:
        raise ValueError(f"/v1/models answers {answer.status}; name the model")
    models = msgspec.json.decode(answer.body, type=_Models).data
    if not models:
        raise ValueError("/v1/models lists no model; name it")
    return models[0].id
