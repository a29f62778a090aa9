"""uvicorn's HTTP protocol with bounds on connections and on the head of a request.

uvicorn with httptools collects headers without limit until the head is complete, so an application
never sees one that does not end. Everything else is uvicorn's.
"""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import Refused
from ..limits import HEAD_SECONDS, MAX_HEADER_BYTES
from .errors import ApiError, as_api_error


class BoundedHttp(HttpToolsProtocol):
    max_connections = 0  # set by `bounded_http`
    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            busy = Refused(503, f"the server is busy: {self.max_connections} connections are open")
            self._refuse(as_api_error(busy))
            return
        # Before its first byte a connection is as idle as it is between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(ApiError(431, f"the headers exceed {MAX_HEADER_BYTES} bytes"))
        elif self._head_timer is None:
            late = ApiError(408, f"the headers did not end within {HEAD_SECONDS:g} s")
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._refuse, late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        self._stop_waiting()
        body = msgspec.json.encode(error.body)
        extra = b"".join(f"{name}: {value}\r\n".encode() for name, value in error.headers)
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%sconnection: close\r\n\r\n%s"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), extra, body)
        )
        self.transport.close()


def bounded_http(max_connections: int) -> type[BoundedHttp]:
    """The protocol for a server with at most so many connections; uvicorn makes its instances."""
    return type("BoundedHttp", (BoundedHttp,), {"max_connections": max_connections})
