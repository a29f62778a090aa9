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

Leaving the loop early, also by an exception, aborts the request at the server.
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
    """Timeouts in seconds; `answer` and `idle` may be None to wait forever.

    `connect`: wait for a connection, also after losing one; then ServerGone. `answer`: from sending
    a request to its first message (the whole answer in `complete`), queueing included. `idle`:
    between two messages of a stream. Both abort the request with RequestTimeout. `heartbeat`: a
    connection silent for this long is closed, with ServerGone for all requests in flight.
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
    """A streamed answer: `async for delta in generation`, once; each Delta has text, token_ids.

    The request is sent when the loop begins. `text` and `token_ids` hold what has arrived;
    `finish_reason` ("stop", "length", "abort"), `usage` and `matched_stop` are None until the end,
    and `usage` stays None if the loop is left early. Raises RequestRefused, RequestTimeout and
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
        """Return the next Delta, or None after the last. Any exception aborts the request."""
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
        """Abort the request. Does nothing if it has ended."""
        if self._over:
            return
        self._over = True
        self.finish_reason = "abort"
        if self._exchange is not None:
            self._exchange.abort()

    async def aclose(self) -> None:
        """Call `abort`; for contextlib.aclosing."""
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
    """A connection to one server, opened by the first call and kept; one event loop per client.

    `address` is the server's socket (ipc:///path or tcp://host:port); by default it is found from
    the HTTP `port` of a server on this machine. Close with `async with` or `aclose()`.

    If the connection is lost, requests in flight raise ServerGone. ZeroMQ reconnects by itself, so
    later calls work once a server is back.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        port: int = DEFAULT_PORT,
        timeout: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """Does not connect yet. Raises wire.paths.BadAddress or UnsafeDirectory."""
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
        """Disconnect. Requests in flight raise ServerGone; the server aborts them. Idempotent."""
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
        """Return the whole answer at once. Cancelling the call aborts the request."""
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
        """Ask for the model's name and readiness. Raises ServerGone or RequestTimeout."""
        pong = await self._ask(Ping(next(self._rids)), self.timeout.connect)
        if not isinstance(pong, Pong):
            raise ClientError(f"unexpected answer {type(pong).__name__}")
        return pong

    async def flush_cache(self, timeout_s: float = 0.0) -> int:
        """Flush all cached prefixes; return the number of KV pages freed.

        The server waits up to `timeout_s` seconds until it is idle. Raises RequestRefused (409) if
        it is not.
        """
        patience = None if self.timeout.answer is None else timeout_s + self.timeout.answer
        flushed = await self._ask(FlushCache(next(self._rids), timeout_s), patience)
        if not isinstance(flushed, Flushed):
            raise ClientError(f"unexpected answer {type(flushed).__name__}")
        if flushed.status != 200:
            raise RequestRefused(flushed.status, flushed.message)
        return flushed.pages

    async def load_lora(self, name: str, path: str, *, pinned: bool = False) -> list[str]:
        """Load an adapter from a directory of the server; return the names of all adapters.

        Requests use it with `lora_path=name` from then on. Loading a name again replaces its
        weights; running requests keep the old ones. Raises RequestRefused: 400 for an unsupported
        adapter or a path that is not allowed, 404 if there is none, 409 on a conflict.
        """
        seq = next(self._rids)
        return await self._loras(LoadLoRA(name, path, pinned, seq))

    async def unload_lora(self, name: str) -> list[str]:
        """Unload an adapter; return the remaining names. Running requests keep its weights.

        Raises RequestRefused (404 or 409).
        """
        return await self._loras(UnloadLoRA(name, next(self._rids)))

    async def loras(self) -> list[str]:
        """List the names of all adapters that requests can use."""
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
