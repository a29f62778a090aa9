"""Minimal HTTP/1.1 client with server-sent events, cheap enough to share the server's cores.

One asyncio protocol per connection, httptools for parsing, no task and no copy per chunk. Used by
`targets`; the contents of events do not enter.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_BODY_BYTES = 16 << 20  # of an answer that is not an event stream
MAX_LINE_BYTES = 4 << 20

OnEvent = Callable[[bytes, float], None]  # one data line, and its time of arrival


class Disconnected(ConnectionError):
    """The connection ended before the answer did."""


@dataclass(frozen=True)
class Answer:
    """A whole answer; `body` is empty for an event stream, which went to `on_event`."""

    status: int
    body: bytes


class EventSplitter:
    """Splits bytes into the `data:` payloads of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads completed by `data`; raises ValueError for an endless line."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of events has more than {MAX_LINE_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class HttpClient:
    """Pool of connections to one server; opens a new one when all are in use."""

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        """Parse `base_url`, such as http://127.0.0.1:30000. Raises ValueError."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is no http:// or https:// address of a server")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc.rpartition("@")[2], "User-Agent": "tokenloom-bench"}
        lines |= headers or {}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        return await self._exchange(self._head("GET", path), lambda _data, _now: None)

    async def post(self, path: str, body: bytes, on_event: OnEvent) -> Answer:
        """Send a request. Raises OSError (no connection), Disconnected, ValueError (bad HTTP or
        events).

        `on_event` is called as bytes arrive; an exception from it ends the call. Cancelling the
        call closes the connection.
        """
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._exchange(self._head("POST", path, length) + body, on_event)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _head(self, method: str, path: str, more: str = "") -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}\r\n".encode()

    async def _exchange(self, request: bytes, on_event: OnEvent) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._on(connection, request, on_event)
            except Disconnected:
                if connection.heard:
                    raise
                # The server has just closed an idle connection, so try another.
        return await self._on(await self._connect(), request, on_event)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection

    async def _on(self, connection: "_Connection", request: bytes, on_event: OnEvent) -> Answer:
        try:
            answer = await connection.exchange(request, on_event)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer


class _Connection(asyncio.Protocol):
    """One exchange at a time. The callbacks without underscore are asyncio's and httptools'."""

    def __init__(self) -> None:
        self.heard = False  # any byte of the current answer
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._lost: Exception | None = None

    async def exchange(self, request: bytes, on_event: OnEvent) -> Answer:
        if self._lost is not None or self._transport is None:
            raise Disconnected("the connection was closed") from self._lost
        self.heard = self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self._events: EventSplitter | None = None
        self._body = bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from nothing

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.close()  # data without a request
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ValueError(f"the server speaks no HTTP/1.1: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc or Disconnected("the server closed the connection")
        self._fail(Disconnected("the connection ended before the answer did"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream"):
            self._events = EventSplitter()

    def on_body(self, data: bytes) -> None:
        if self._events is not None:
            for payload in self._events.feed(data):
                self._on_event(payload, self._now)
        else:
            self._body += data
            if len(self._body) > MAX_BODY_BYTES:
                raise ValueError(f"an answer has more than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        self.reusable = bool(self._parser.should_keep_alive())
        if self._answer is not None and not self._answer.done():
            status = self._parser.get_status_code()
            self._answer.set_result(Answer(status, bytes(self._body)))

    def _fail(self, error: BaseException) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
