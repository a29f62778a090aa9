"""Cycle: one HTTP request and its answer, with ASGI's `receive` and `send` and answer framing.

`connection` makes a Cycle for each request, feeds it the body, and runs the application over it.
Deadlines and other requests of the connection do not enter.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from ..errors import Refused
from ..limits import RETRY_AFTER_DRAINING
from .errors import INTERNAL_ERROR, ApiError, as_api_error

log = logging.getLogger(__name__)

RawHeaders = Iterable[tuple[bytes, bytes]]

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class Line(Protocol):
    """Interface of the connection that a Cycle uses."""

    may_write: asyncio.Event  # set while the send buffer has room

    def write(self, data: bytes) -> None: ...

    def body_taken(self) -> None: ...

    def answered(self, cycle: "Cycle") -> None: ...

    def failed(self, cycle: "Cycle", error: ApiError) -> None: ...


class Cycle:
    def __init__(
        self,
        line: Line,
        scope: Scope,
        *,
        keep_alive: bool,
        expects_continue: bool,
        began: float,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Take `headers` that are added to every answer."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.began = began
        self.more_body = True
        self.status = 0  # of the answer; 0 until there is one
        self.sent_bytes = 0  # of the answer's body
        self.started = False  # the answer's status line is decided
        self.complete = False  # the answer is written
        self.gone = False  # the client has left
        self._line = line
        self._own_headers = headers
        self._expects_continue = expects_continue
        self._body = bytearray()
        self._news = asyncio.Event()
        self._head = b""  # of the answer, until it is written with the first bytes of the body
        self._chunked = False

    @property
    def unread_bytes(self) -> int:
        """Bytes of the body that the application has not read."""
        return len(self._body)

    def feed(self, data: bytes) -> None:
        self._body += data
        self._news.set()

    def end_body(self) -> None:
        self.more_body = False
        self._news.set()

    def disconnect(self) -> None:
        self.gone = True
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Run the application to the end; if it fails, send an error or close."""
        failure = ApiError(500, INTERNAL_ERROR)
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.complete or self.gone):
                raise RuntimeError("the application did not complete its answer")
        except asyncio.CancelledError:
            ending = Refused(503, "the server is shutting down", RETRY_AFTER_DRAINING)
            failure = as_api_error(ending)
            raise
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error)
        finally:
            if not (self.complete or self.gone):
                self._line.failed(self, failure)

    async def receive(self) -> Message:
        """Return the next piece of the body, or `http.disconnect` when the exchange is over."""
        if self._expects_continue and self.more_body and not self._body and not self.gone:
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        if not (self.gone or self.complete):
            self._line.body_taken()
            await self._news.wait()
            self._news.clear()
        if self.gone or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if not self._line.may_write.is_set():
            await self._line.may_write.wait()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            return
        body: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        head, self._head = self._head, b""
        self._line.write(head + self._framed(body, more))
        self.sent_bytes += len(body)
        if not more:
            self.complete = True
            self._news.set()
            self._line.answered(self)

    def _start(self, status: int, headers: RawHeaders) -> None:
        self.started = True
        self.status = status
        if self.more_body:  # the rest would be parsed as the next request
            self.keep_alive = False
        lines = [_STATUS_LINES[status]]
        has_length = False
        for name, value in (*self._own_headers, *headers):
            if b"\r" in value or b"\n" in value or b"\0" in value:
                raise ValueError(f"a header value with a line break: {name!r}")
            has_length = has_length or name == b"content-length"
            lines.append(b"%s: %s\r\n" % (name, value))
        if not has_length and self.scope["http_version"] == "1.0":
            self.keep_alive = False  # the end of the connection ends the body
        elif not has_length:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"".join(lines) + b"\r\n"

    def _framed(self, body: bytes, more: bool) -> bytes:
        if self.scope["method"] == "HEAD":
            return b""
        if not self._chunked:
            return body
        chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        return chunk if more else chunk + b"0\r\n\r\n"
