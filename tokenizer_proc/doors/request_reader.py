"""RequestReader: parse the bytes of one connection to heads and bodies, through httptools.

Owns the parser and the bounds on unfinished requests. `connection` feeds it pieces and receives its
events, and decides when to read and what to answer.
"""

from typing import Protocol

import httptools
import msgspec

from ..limits import MAX_HEADER_BYTES
from . import request_head
from .errors import ApiError

_PIECE = 1024  # bytes parsed at once where requests may end; bounds requests parsed ahead


class Head(msgspec.Struct, frozen=True):
    """A request without its body; header names are in lower case."""

    method: str
    raw_path: bytes
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool


class Sink(Protocol):
    """Receiver of the parser's events."""

    def head_began(self) -> None: ...

    def head_ended(self, head: Head) -> None: ...

    def body_came(self, data: bytes) -> None: ...

    def body_ended(self) -> None: ...


class RequestReader:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._closed = False  # the last request asked to close the connection
        # State of the request being read:
        self._in_head = False
        self._in_body = False
        self._is_upgrade = False
        self._unparsed = 0  # bytes since the head began, or since the last byte of the body
        self._body_left: int | None = 0  # None: chunked
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def close(self) -> None:
        """Release the parser, which refers back to this object."""
        del self._parser

    def read(self, data: bytearray) -> None:
        """Consume the next piece of `data`; raises ApiError when it breaks a rule."""
        if self._closed:
            data.clear()
            return
        size = self._body_left if self._in_body else None
        piece = data[: size or _PIECE]
        del data[: len(piece)]
        self._unparsed += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            data[:0] = self._head_without_upgrade() + piece[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, httptools.HttpParserInvalidURLError) or cause is None:
                raise ApiError(400, "the target of the request is not a valid path") from None
            raise cause from None
        except httptools.HttpParserError as error:
            if not self._closed:  # else the error concerns bytes after the last request
                raise ApiError(400, f"this is not HTTP/1.1: {error}") from None
        if self._unparsed > MAX_HEADER_BYTES and (self._in_head or self._in_body):
            raise ApiError(
                431, f"headers, trailers or heads of chunks exceed {MAX_HEADER_BYTES} bytes"
            )

    def _head_without_upgrade(self) -> bytes:
        """Rebuild the head as HTTP/1.1 without Upgrade, for which the parser assumes no body.

        A client that asks for another protocol continues in HTTP if the server ignores it.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise ApiError(405, "CONNECT is not served here")
        version = self._parser.get_http_version()
        self._parser = httptools.HttpRequestParser(self)
        return request_head.without_upgrade(method, self._target, version, self._headers)

    # Callbacks of httptools

    def on_message_begin(self) -> None:
        self._in_head, self._is_upgrade = True, False
        self._unparsed = 0
        self._target = b""
        self._headers = []
        self._sink.head_began()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_upgrade = self._parser.should_upgrade()
        if self._is_upgrade:
            return
        head = self._head()
        self._in_head, self._in_body = False, True
        self._unparsed = 0
        self._body_left = request_head.body_length(head.headers)
        self._sink.head_ended(head)

    def on_body(self, data: bytes) -> None:
        self._unparsed = 0
        if self._body_left is not None:
            self._body_left -= len(data)
        self._sink.body_came(data)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_body = False
        self._closed = not self._parser.should_keep_alive()
        self._sink.body_ended()

    def _head(self) -> Head:
        version = self._parser.get_http_version()
        problem = request_head.fault(version, self._headers)
        if problem is not None:
            raise ApiError(400, problem)
        target = httptools.parse_url(self._target)
        headers = self._headers
        if target.host is not None:
            headers = request_head.with_host(headers, target.host, target.port)
        return Head(
            method=self._parser.get_method().decode("ascii"),
            raw_path=target.path or b"/",
            query=target.query or b"",
            version=version,
            headers=headers,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
        )
