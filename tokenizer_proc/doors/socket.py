"""SocketDoor: serves `wire.client_messages` to DEALER and REQ clients, in msgpack or JSON.

Owns the live requests of each client, and sends exactly one Done or Failed for each of their rids.
Malformed input is answered with an error and affects no other client. The front encodes text and
talks to the scheduler, the router holds the connections; HTTP is another door.

A message is one frame, the payload; a REQ peer puts an empty frame before it, and gets one before
its answers. The first byte of a payload tells msgpack from JSON, and the answer has the same
encoding.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from ...wire import codec, paths
from ...wire.client_messages import (
    Abort,
    Delta,
    Done,
    Failed,
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
from ...wire.log_limit import LogLimit
from ...wire.messages import Finish, StrOut
from ...wire.sampling import InvalidRequest
from ..errors import Refused
from ..front import Front, RequestStream
from ..labels import labels_of
from ..limits import (
    MAX_ERROR_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_SOCKET_QUESTIONS,
    RETRY_AFTER_DRAINING,
)
from .client_frames import read_message, rid_of
from .request_ids import check_rid
from .router import DoorLimits, Peer, PeerGone, Router

RETRY_SECONDS = 0.05

log = logging.getLogger(__name__)
_Question = FlushCache | LoadLoRA | UnloadLoRA | ListLoRAs

DEFAULT_LIMITS = DoorLimits()


@dataclass(frozen=True, slots=True)
class _Back:
    """How to answer a client: its connection, its envelope (empty frame or none), its encoding."""

    peer: Peer
    envelope: tuple[bytes, ...]
    json: bool


@dataclass(slots=True, eq=False)
class _Live:
    """A request between its arrival and its terminal message."""

    rid: str
    back: _Back
    streaming: bool
    stream: RequestStream | None = None  # None until it is submitted
    task: "asyncio.Task[None] | None" = None
    unsent_text: list[str] = field(default_factory=list)
    unsent_ids: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0

    abort_deadline: asyncio.TimerHandle | None = None

    def abort_soon(self, seconds: float) -> None:
        """Abort the stream; if its last row does not come within `seconds`, close it."""
        if self.stream is not None and self.abort_deadline is None:
            self.stream.abort()
            loop = asyncio.get_running_loop()
            self.abort_deadline = loop.call_later(seconds, self.stream.close)

    def take(self, row: StrOut) -> None:
        self.unsent_text.append(row.text)
        self.unsent_ids.extend(row.token_ids)
        self.completion_tokens += len(row.token_ids)
        self.cached_tokens = max(self.cached_tokens, row.cached_tokens)

    def delta(self) -> Delta | None:
        """Take the unsent text and ids as a Delta; None if there are none or it does not stream."""
        text, ids = "".join(self.unsent_text), self.unsent_ids
        if not self.streaming or not (text or ids):
            return None
        self.unsent_text, self.unsent_ids = [], []
        return Delta(rid=self.rid, text=text, token_ids=ids)

    def terminal(self, finish: Finish) -> Done | Failed:
        if finish.reason == "error":
            return _failed(self.rid, Refused.of(finish))
        return Done(
            rid=self.rid,
            text="".join(self.unsent_text),
            token_ids=self.unsent_ids,
            finish_reason=finish.reason,
            usage=Usage(
                prompt_tokens=0 if self.stream is None else self.stream.prompt_tokens,
                completion_tokens=self.completion_tokens,
                cached_tokens=self.cached_tokens,
            ),
            matched_stop=finish.matched,
        )


class SocketDoor:
    """Binds its address when made (Router lists the errors) and answers while `serve` runs."""

    def __init__(
        self,
        front: Front,
        address: str,
        limits: DoorLimits = DEFAULT_LIMITS,
    ) -> None:
        self._front = front
        self._limits = limits
        self._router = Router(address, limits, self._take, self._left)
        self.address = self._router.address
        self._live: dict[Peer, dict[str, _Live]] = {}
        self._questions: Counter[Peer] = Counter()  # unanswered ones
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._left_logged = LogLimit(log)
        self._unread_logged = LogLimit(log)

    async def serve(self) -> None:
        """Answer clients until cancelled or closed."""
        try:
            await self._router.serve()
        finally:
            self.close()
            await self._router.flush()

    def close(self) -> None:
        """Fail every live request, close its stream and free the address. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for live in [live for lives in self._live.values() for live in lives.values()]:
            self._drop(live)
            stopping = Refused(503, "the server is stopping", RETRY_AFTER_DRAINING)
            self._answer(live.back, _failed(live.rid, stopping))
        for task in self._tasks:
            task.cancel()
        self._router.close()

    def _take(self, peer: Peer, parts: list[bytes]) -> None:
        envelope = (b"",) if len(parts) == 2 and not len(parts[0]) else ()
        payload = parts[-1]
        back = _Back(peer, envelope, codec.is_json(payload[:1]))
        if len(parts) != 1 + len(envelope):
            self._answer(back, Failed("", 400, f"a message is one frame, got {len(parts)}"))
        elif len(payload) > paths.MAX_REQUEST_BYTES:
            text = f"the message has {len(payload)} bytes; {paths.MAX_REQUEST_BYTES} are allowed"
            self._answer(back, Failed(rid_of(payload), 413, text))
        else:
            self._decode(back, payload)

    def _decode(self, back: _Back, payload: bytes) -> None:
        try:
            message = read_message(payload)
        except InvalidRequest as error:
            self._answer(back, _invalid(rid_of(payload), error))
        else:
            self._handle(back, message)

    def _handle(self, back: _Back, message: FromClient) -> None:
        match message:
            case Generate():
                failed = self._start(back, message)
                if failed is not None:
                    self._answer(back, failed)
            case Abort(rid=rid):
                self._abort(back.peer, rid)
            case Ping(seq=seq):
                front = self._front
                self._answer(back, Pong(seq, front.model_name, front.ready, front.recommended))
            case FlushCache() | LoadLoRA() | UnloadLoRA() | ListLoRAs():
                self._ask(back, message)

    def _ask(self, back: _Back, question: _Question) -> None:
        """Start a task for `question`, or refuse it if its client has too many unanswered."""
        if self._questions[back.peer] >= MAX_SOCKET_QUESTIONS:
            text = f"{MAX_SOCKET_QUESTIONS} questions of this client wait for an answer"
            self._answer(back, self._answer_to(question, 503, text))
            return
        self._questions[back.peer] += 1
        task = self._keep(asyncio.create_task(self._answer_question(back, question)))
        task.add_done_callback(lambda _: self._answered(back.peer))

    def _answered(self, peer: Peer) -> None:
        self._questions[peer] -= 1
        if not self._questions[peer]:
            del self._questions[peer]

    def _start(self, back: _Back, request: Generate) -> Failed | None:
        """Start a task for `request`, or return the reason to refuse it."""
        rid = request.rid
        try:
            check_rid(rid)
        except InvalidRequest as error:
            return _invalid(rid[:MAX_REQUEST_ID_CHARS], error)
        lives = self._live.get(back.peer, {})
        if rid in lives:
            return Failed(rid, 409, f"rid {rid!r} is in use by a request that still runs", "rid")
        live = _Live(rid, back, request.stream)
        self._live.setdefault(back.peer, {})[rid] = live
        live.task = self._keep(asyncio.create_task(self._answer_request(live, request)))
        return None

    async def _submit(self, live: _Live, request: Generate) -> Failed | RequestStream:
        try:
            input_ids = await self._encode(request)
            async with self._front.adapters.using([request.lora_path]) as (lora_id,):
                live.stream = self._front.submit(
                    input_ids, request.sampling, labels_of(request), lora_id
                )
        except InvalidRequest as error:
            return _invalid(live.rid, error)
        except Refused as error:
            return _failed(live.rid, error)
        return live.stream

    async def _encode(self, request: Generate) -> list[int]:
        given = [
            name for name in ("text", "input_ids", "messages") if getattr(request, name) is not None
        ]
        if len(given) != 1:
            text = "exactly one of text, input_ids and messages must be given"
            raise InvalidRequest(given[-1] if given else "text", f"{text}, got {given or 'none'}")
        if request.text is not None:
            return (await self._front.encode_texts([request.text]))[0]
        if request.messages is not None:
            return await self._front.encode_chat(request.messages)
        return request.input_ids or []

    def _abort(self, peer: Peer, rid: str) -> None:
        """Abort a request; ignore a rid that is not live, whose terminal message crossed the Abort.

        A submitted request gets its terminal message when the scheduler has ended it, so that it
        includes the text that the detokenizer still holds.
        """
        live = self._live.get(peer, {}).get(rid)
        if live is None:
            return
        if live.stream is not None:
            live.abort_soon(self._limits.stall_seconds)
            return
        self._drop(live)
        self._answer(live.back, live.terminal(Finish("abort")))

    def _left(self, peer: Peer) -> None:
        lives = list(self._live.get(peer, {}).values())
        if lives:
            self._left_logged.info("a socket client left; aborting its %d requests", len(lives))
        for live in lives:
            self._drop(live)

    def _drop(self, live: _Live) -> None:
        """Cancel a request's task and forget it; the caller sends the terminal message."""
        if live.task is not None:
            live.task.cancel()
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        if live.abort_deadline is not None:
            live.abort_deadline.cancel()
        if live.stream is not None:
            live.stream.close()
        lives = self._live.get(live.back.peer, {})
        if lives.get(live.rid) is live:
            del lives[live.rid]
        if not lives:
            self._live.pop(live.back.peer, None)

    def _keep(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer_request(self, live: _Live, request: Generate) -> None:
        """Serve a request to its terminal message.

        Nothing is awaited between sending that and `_forget`, so that an Abort finds both or none.
        """
        try:
            stream = await self._submit(live, request)
            if isinstance(stream, Failed):
                self._answer(live.back, stream)
            else:
                await self._last_word(live, await self._relay(live, stream))
        except PeerGone:
            self._left_logged.info("the client of a request left")
        except Exception:  # a bug in one request must not end the door for all
            log.exception("request %r of a socket client broke", live.rid)
            self._answer(live.back, Failed(live.rid, 500, "internal error"))
        finally:
            self._forget(live)

    async def _relay(self, live: _Live, stream: RequestStream) -> Done | Failed:
        """Send a Delta for each row as it comes; return the terminal message unsent."""
        async for row in stream:
            live.take(row)
            if row.finish is not None:
                return live.terminal(row.finish)
            if live.abort_deadline is not None:
                continue  # aborted: Done carries the rest
            delta = live.delta()
            if delta is not None and not self._send(live.back, delta):
                stream.close()
                self._unread_logged.warning("a socket client does not read; a request is aborted")
                unread = self._limits.unread_bytes
                text = f"the client does not read: over {unread} bytes wait for it"
                return Failed(live.rid, 408, text)
        if live.abort_deadline is not None:
            return live.terminal(Finish("abort"))
        stopped = "the server stopped before the answer was complete"
        return _failed(live.rid, Refused(503, stopped, RETRY_AFTER_DRAINING))

    async def _answer_question(self, back: _Back, question: _Question) -> None:
        status, text, pages = 200, "", 0
        try:
            pages = await self._do(question)
        except InvalidRequest as error:
            status, text = 400, error.message
        except Refused as error:
            status, text = error.status, error.message
        except Exception:  # a bug in one question must not end the door for all
            log.exception("%s of a socket client broke", type(question).__name__)
            status, text = 500, "internal error"
        self._answer(back, self._answer_to(question, status, text, pages))

    def _answer_to(
        self, question: _Question, status: int, text: str, pages: int = 0
    ) -> Flushed | LoRAs:
        if isinstance(question, FlushCache):
            return Flushed(question.seq, status, text, pages)
        return LoRAs(question.seq, status, text, self._front.adapters.registry.names())

    async def _do(self, question: _Question) -> int:
        """Carry out a question; return the number of cached pages that it freed."""
        match question:
            case FlushCache(timeout=timeout):
                return await self._front.flush_cache(timeout)
            case LoadLoRA(lora_name=name, lora_path=path, pinned=pinned):
                await self._front.adapters.load(name, path, pinned=pinned)
            case UnloadLoRA(lora_name=name):
                self._front.adapters.unload(name)
        return 0

    async def _last_word(self, live: _Live, message: Done | Failed) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.stall_seconds
        while not self._send(live.back, message):
            if asyncio.get_running_loop().time() > deadline:
                self._unread_logged.warning("the last word on a request was not taken")
                return
            await asyncio.sleep(RETRY_SECONDS)

    def _answer(self, back: _Back, message: ToClient) -> None:
        """Send an answer, or drop it if the client does not read or has left."""
        try:
            if not self._send(back, message):
                self._unread_logged.warning("an answer was dropped: its client does not read")
        except PeerGone:
            self._left_logged.info("an answer was dropped: its client left")

    def _send(self, back: _Back, message: ToClient) -> bool:
        """Send a message; False if the client has too much unread. Raises PeerGone if it left."""
        payload = codec.encode_for(message, json=back.json)
        return back.peer.send([*back.envelope, payload])


def _invalid(rid: str, error: InvalidRequest) -> Failed:
    return Failed(rid, 400, error.message[:MAX_ERROR_CHARS], error.param or None, code=error.code)


def _failed(rid: str, refused: Refused) -> Failed:
    return Failed(rid, refused.status, refused.message, retry_after=refused.retry_after)
