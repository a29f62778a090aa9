"""AsyncClient: many requests at once over one socket to a server, for asyncio programs.

    import asyncio
    from tokenloom.client import AsyncClient

    async def main() -> None:
        async with AsyncClient() as client:
            answer = client.generate("The capital of France is", max_new_tokens=20)
            async for delta in answer:
                print(delta.text, end="", flush=True)
            print(f"\\n{answer.finish_reason}, {answer.usage.completion_tokens} tokens")

    asyncio.run(main())

Leaving the loop early, in whatever way, aborts the request at the server.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, Unpack

from ..wire import paths
from ..wire.client_messages import (
    Delta,
    Done,
    FlushCache,
    Flushed,
    FromClient,
    Generate,
    ListLoRAs,
    LoadLoRA,
    LoRAs,
    Ping,
    Pong,
    ToClient,
    UnloadLoRA,
    Usage,
)
from .errors import ClientError, RequestRefused, ServerGone
from .link import Exchange, Link, seq_key
from .request import Asked, Messages, RequestOptions

DEFAULT_PORT = 30000
_Question = Ping | FlushCache | LoadLoRA | UnloadLoRA | ListLoRAs


@dataclass(frozen=True)
class Timeouts:
    """All in seconds; None waits for ever.

    `connect`: until a server is there (also after it went away), then ServerGone.
    `answer`: from sending a request to the first message for it (that is the whole answer in
    `complete`): waiting in the server's queue counts. `idle`: between two messages of a stream.
    Both end in RequestTimeout and abort the request. `heartbeat`: a connection whose other end
    shows no life for so long is given up: ServerGone for all that is in flight.
    """

    connect: float = 5.0
    answer: float | None = 600.0
    idle: float | None = 60.0
    heartbeat: float = 15.0


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    usage: Usage
    matched_stop: int | str | None = None


class AsyncGeneration:
    """An answer in pieces: `async for delta in generation`, once; each Delta has text, token_ids.

    The request is sent when the loop begins. `text` and `token_ids` are what has come so far;
    `finish_reason` ("stop", "length", "abort"), `usage` and `matched_stop` are None until the end,
    and `usage` stays None when the loop was left early. Raises RequestRefused, RequestTimeout and
    ServerGone.
    """

    def __init__(self, begin: Callable[[], Awaitable[Exchange]], timeouts: Timeouts) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: Literal["stop", "length", "abort"] | None = None
        self.usage: Usage | None = None
        self.matched_stop: int | str | None = None
        self._begin = begin
        self._timeouts = timeouts
        self._exchange: Exchange | None = None
        self._iterated = False
        self._over = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        if self._iterated:
            raise RuntimeError("an answer can be iterated over only once")
        self._iterated = True
        try:
            while (delta := await self.read()) is not None:
                yield delta
        finally:
            self.abort()

    async def read(self) -> Delta | None:
        """The next piece; None after the last one. Any failure ends the request."""
        try:
            while not self._over:
                delta = self._note(await self._next())
                if delta.text or delta.token_ids:
                    return delta
        except asyncio.CancelledError:
            self.abort()
            raise
        except BaseException:
            self._over = True
            if self._exchange is not None:
                self._exchange.abort()
            raise
        return None

    def abort(self) -> None:
        """Want no more of it. Nothing happens when it has ended."""
        if self._over:
            return
        self._over = True
        self.finish_reason = "abort"
        if self._exchange is not None:
            self._exchange.abort()

    async def aclose(self) -> None:
        """As `abort`; for contextlib.aclosing."""
        self.abort()

    async def _next(self) -> ToClient:
        if self._exchange is not None:
            return await self._exchange.next(self._timeouts.idle)
        self._exchange = await self._begin()
        return await self._exchange.next(self._timeouts.answer)

    def _note(self, message: ToClient) -> Delta:
        if isinstance(message, Done):
            self._over = True
            self.finish_reason = message.finish_reason
            self.usage = message.usage
            self.matched_stop = message.matched_stop
            message = Delta(message.rid, message.text, message.token_ids)
        if not isinstance(message, Delta):
            raise ClientError(f"unexpected answer {type(message).__name__}")
        self.text += message.text
        self.token_ids += message.token_ids
        return message


class AsyncClient:
    """A connection to one server, made at the first call and kept; one event loop per client.

    `address` is the socket door's (ipc:///path or tcp://host:port); without one it is found from
    the HTTP `port` of a server on this machine. Close it with `async with` or `aclose()`.

    When the server goes away, requests in flight raise ServerGone; ZeroMQ reconnects by itself, so
    later calls work once a server is back.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        port: int = DEFAULT_PORT,
        timeout: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """Raises wire.paths.BadAddress or UnsafeDirectory; connects to nothing yet."""
        self.address = paths.find_door(port) if address is None else paths.full_address(address)
        self.timeout = timeout
        self._link: Link | None = None
        self._closed = False
        self._rids = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """What is in flight raises ServerGone here and is aborted at the server. Idempotent."""
        self._closed = True
        if self._link is not None:
            await self._link.aclose()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGeneration:
        """Stream the answer to a prompt, a chat or token ids: exactly one of the three."""
        request = self._request(Asked(prompt, messages, input_ids, options), stream=True)
        return AsyncGeneration(lambda: self._open(request.rid, request), self.timeout)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The whole answer at once. Cancelling the call aborts the request."""
        request = self._request(Asked(prompt, messages, input_ids, options), stream=False)
        exchange = await self._open(request.rid, request)
        try:
            done = await exchange.next(self.timeout.answer)
        finally:
            exchange.abort()
        if not isinstance(done, Done):
            raise ClientError(f"unexpected answer {type(done).__name__}")
        return Completion(
            done.text, done.token_ids, done.finish_reason, done.usage, done.matched_stop
        )

    async def ping(self) -> Pong:
        """The model's name, and whether it is ready. Raises ServerGone or RequestTimeout."""
        pong = await self._ask(Ping(next(self._rids)), self.timeout.connect)
        if not isinstance(pong, Pong):
            raise ClientError(f"unexpected answer {type(pong).__name__}")
        return pong

    async def flush_cache(self, timeout_s: float = 0.0) -> int:
        """Forget all cached prefixes; the number of KV pages freed.

        Waits up to `timeout_s` until nothing runs at the server, which else refuses:
        RequestRefused with status 409.
        """
        patience = None if self.timeout.answer is None else timeout_s + self.timeout.answer
        flushed = await self._ask(FlushCache(next(self._rids), timeout_s), patience)
        if not isinstance(flushed, Flushed):
            raise ClientError(f"unexpected answer {type(flushed).__name__}")
        if flushed.status != 200:
            raise RequestRefused(flushed.status, flushed.message)
        return flushed.pages

    async def load_lora(self, name: str, path: str, *, pinned: bool = False) -> list[str]:
        """Load an adapter from a directory of the server; the names of all adapters after it.

        Requests can ask for it with `lora_path=name` once this returns. A name that is there
        already gets the new weights; requests that run keep the old ones. Raises RequestRefused:
        400 for an adapter or a path that the server does not take, 404 if there is none, 409.
        """
        seq = next(self._rids)
        return await self._loras(LoadLoRA(name, path, pinned, seq))

    async def unload_lora(self, name: str) -> list[str]:
        """The names that are left; requests that run go on. RequestRefused with 404 or 409."""
        return await self._loras(UnloadLoRA(name, next(self._rids)))

    async def loras(self) -> list[str]:
        """The names of all adapters that requests can ask for."""
        return await self._loras(ListLoRAs(next(self._rids)))

    async def _loras(self, question: LoadLoRA | UnloadLoRA | ListLoRAs) -> list[str]:
        answer = await self._ask(question, self.timeout.answer)
        if not isinstance(answer, LoRAs):
            raise ClientError(f"unexpected answer {type(answer).__name__}")
        if answer.status != 200:
            raise RequestRefused(answer.status, answer.message)
        return answer.names

    async def _ask(self, question: _Question, seconds: float | None) -> ToClient:
        exchange = await self._open(seq_key(question.seq), question)
        try:
            return await exchange.next(seconds)
        finally:
            exchange.forget()

    def _request(self, asked: Asked, *, stream: bool) -> Generate:
        return asked.generate(str(next(self._rids)), stream=stream)

    async def _open(self, key: str, message: FromClient) -> Exchange:
        if self._closed:
            raise ServerGone("this client is closed")
        if self._link is None:
            self._link = Link(self.address, self.timeout.heartbeat)
        link = self._link
        if link.loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call")
        await link.up(self.timeout.connect)
        return link.open(key, message)
