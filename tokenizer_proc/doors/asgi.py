"""Exchange: one HTTP request and its answer over plain ASGI messages.

Used by the handlers. Reads bodies within bounds, sends JSON or server-sent events (one ASGI message
per call, no response objects), notices a client that leaves. Deadlines belong to `connection`;
models and tokens do not enter.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from ..limits import MAX_HEADER_BYTES, MAX_HEADERS
from .body_budget import BodyBudget
from .errors import ApiError, ClientGone, Headers
from .request_ids import is_request_id

_encoder = msgspec.json.Encoder()

_DONE = b"data: [DONE]\n\n"


def event(payload: msgspec.Struct) -> bytes:
    """Encode one server-sent event; msgspec's JSON has no raw line breaks."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


class Exchange:
    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        bodies: BodyBudget,
    ) -> None:
        """Take the door's `bodies` budget, which all its requests share."""
        self.scope = scope
        self.started = False  # a status line was sent
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def query(self, name: str) -> str | None:
        """Return the last value of a query parameter."""
        query: bytes = self.scope["query_string"]
        given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
        return given[name][-1] if name in given else None

    def check_headers(self) -> None:
        headers: list[tuple[bytes, bytes]] = self.scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise ApiError(
                431,
                f"{len(headers)} headers with {size} bytes; at most {MAX_HEADERS} with "
                f"{MAX_HEADER_BYTES} bytes are allowed",
            )

    async def read_body(self) -> bytes:
        """Read the whole body.

        Raises ApiError 413 or 415, Refused when all bodies together are too large, ClientGone when
        the client leaves.
        """
        if (self.header(b"content-encoding") or b"identity").lower() != b"identity":
            raise ApiError(415, "compressed bodies are not accepted")
        declared = self.header(b"content-length")
        if declared is not None and (not declared.isdigit() or int(declared[:20]) > self._limit):
            raise self._too_large()
        body = bytearray()
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                if len(body) + len(piece) > self._limit:
                    raise self._too_large()
                self._bodies.take(len(piece))
                body += piece
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self._bodies.give_back(len(body))

    @property
    def _limit(self) -> int:
        return self._max_body_bytes

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes")

    async def reply(
        self, status: int, payload: msgspec.Struct | Sequence[msgspec.Struct], headers: Headers = ()
    ) -> None:
        await self._reply(status, "application/json", _encoder.encode(payload), headers)

    async def reply_text(self, text: str) -> None:
        await self._reply(200, "text/plain; charset=utf-8", text.encode(), ())

    async def _reply(self, status: int, kind: str, body: bytes, headers: Headers) -> None:
        await self._start(
            status, [("content-type", kind), ("content-length", str(len(body))), *headers]
        )
        await self._send({"type": "http.response.body", "body": body})

    async def send_events(self, frames: bytes) -> None:
        """Send frames of a stream; the first call sends the head of the answer."""
        if not self.started:
            await self._start(
                200,
                [
                    ("content-type", "text/event-stream; charset=utf-8"),
                    ("cache-control", "no-cache"),
                    ("x-accel-buffering", "no"),
                ],
            )
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end_events(self, frames: bytes = b"") -> None:
        """Send the last frames and [DONE]."""
        await self._send({"type": "http.response.body", "body": frames + _DONE, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in headers]
        request_id = self.header(b"x-request-id")
        if request_id is not None and is_request_id(request_id):
            raw.append((b"x-request-id", request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Cancel the block and raise ClientGone when the client leaves or is disconnected.

        Call it after the body was read: only then does the server report nothing but the
        disconnect.
        """
        try:
            async with asyncio.timeout(None) as cut:
                watcher = asyncio.create_task(self._watch(cut))
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError:
            if cut.expired():
                raise ClientGone from None
            raise

    async def _watch(self, cut: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        cut.reschedule(asyncio.get_running_loop().time())
