"""uvicorn's HTTP protocol with a bound on the head of a request, in bytes and in time.

uvicorn with httptools collects headers without limit until the head is complete, so an application
never sees one that does not end. Everything else is uvicorn's.
"""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .limits import HEAD_SECONDS, MAX_HEADER_BYTES


class BoundedHttp(HttpToolsProtocol):
    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

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
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body)
        )
        self.transport.close()
