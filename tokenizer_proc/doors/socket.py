"""The socket door: `wire.client_messages` with DEALER clients, in msgpack or JSON.

Owns who asked for what over the socket, and that every rid of every client ends in exactly one Done
or Failed. Whatever bytes arrive cost their sender an answer, and nobody else anything. Encoding
text and talking to the scheduler is the front's, connections are the router's, HTTP is the other
door's.

Frames are [identity, payload]; the empty frame that a REQ peer puts between is kept in its answers.
The first byte of a payload says msgpack or JSON; the answer comes in the same form.
"""

import asyncio
import logging
import re
from dataclasses import dataclass, field

import msgspec
import zmq.asyncio

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
from ...wire.messages import Finish, StrOut
from ...wire.sampling import InvalidRequest
from ..errors import Refused
from ..front import Front, RequestStream
from ..labels import labels_of
from ..limits import MAX_REQUEST_ID_CHARS, RETRY_AFTER_DRAINING
from .request_ids import check_rid
from .router import DoorLimits, PeerGone, Router

RETRY_SECONDS = 0.05
MAX_ERROR_CHARS = 500  # decode errors quote their input

log = logging.getLogger(__name__)


DEFAULT_LIMITS = DoorLimits()


@dataclass(frozen=True, slots=True)
class _Back:
    """The way back to a client: its identity, the envelope of its kind of socket, its encoding."""

    identity: bytes
    envelope: tuple[bytes, ...]
    json: bool


@dataclass(slots=True, eq=False)
class _Live:
    """A request between its arrival and its terminal message."""

    rid: str
    back: _Back
    streaming: bool
    stream: RequestStream | None = None  # none while its text is encoded
    task: "asyncio.Task[None] | None" = None
    unsent_text: list[str] = field(default_factory=list)
    unsent_ids: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0

    def take(self, row: StrOut) -> None:
        self.unsent_text.append(row.text)
        self.unsent_ids.extend(row.token_ids)
        self.completion_tokens += len(row.token_ids)
        self.cached_tokens = max(self.cached_tokens, row.cached_tokens)

    def delta(self) -> Delta | None:
        """What has come since the last one; None when there is nothing or it is not wanted yet."""
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
    """Takes its address when made (see Router for the errors) and answers while `serve` runs."""

    def __init__(
        self,
        front: Front,
        address: str,
        context: zmq.asyncio.Context,
        limits: DoorLimits = DEFAULT_LIMITS,
    ) -> None:
        self._front = front
        self._limits = limits
        self._router = Router(context, address, limits, self._left)
        self.address = self._router.address
        self._live: dict[bytes, dict[str, _Live]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def serve(self) -> None:
        """Answer clients until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._router.watch())
                group.create_task(self._receive())
        finally:
            self.close()

    def close(self) -> None:
        """Tell every client that waits, let go of every stream, free the address. Idempotent."""
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

    async def _receive(self) -> None:
        while True:
            self._take(*await self._router.receive())
            await asyncio.sleep(0)  # receiving waits for nothing while more is there: others' turn

    def _take(self, identity: bytes, parts: list[memoryview]) -> None:
        envelope = (b"",) if len(parts) == 2 and not len(parts[0]) else ()
        payload = parts[-1] if parts else memoryview(b"")
        back = _Back(identity, envelope, codec.is_json(payload[:1].tobytes()))
        if len(parts) != 1 + len(envelope):
            self._answer(back, Failed("", 400, f"a message is one frame, got {len(parts)}"))
        elif len(payload) > paths.MAX_REQUEST_BYTES:
            text = f"the message has {len(payload)} bytes; {paths.MAX_REQUEST_BYTES} are allowed"
            self._answer(back, Failed(_rid_of(payload.tobytes()), 413, text))
        else:
            self._decode(back, payload.tobytes())

    def _decode(self, back: _Back, payload: bytes) -> None:
        try:
            message = codec.decode_from_client(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            text = f"malformed message: {error}"[:MAX_ERROR_CHARS]
            self._answer(back, Failed(_rid_of(payload), 400, text, _field_of(error)))
        else:
            self._handle(back, message)

    def _handle(self, back: _Back, message: FromClient) -> None:
        match message:
            case Generate():
                failed = self._start(back, message)
                if failed is not None:
                    self._answer(back, failed)
            case Abort(rid=rid):
                self._abort(back.identity, rid)
            case Ping(seq=seq):
                self._answer(back, Pong(seq, self._front.model_name, self._front.ready))
            case FlushCache():
                self._keep(asyncio.create_task(self._flush(back, message)))
            case LoadLoRA() | UnloadLoRA() | ListLoRAs():
                self._keep(asyncio.create_task(self._adapters(back, message)))

    def _start(self, back: _Back, request: Generate) -> Failed | None:
        """Give `request` a task, or say why not."""
        rid = request.rid
        try:
            check_rid(rid)
        except InvalidRequest as error:
            return Failed(rid[:MAX_REQUEST_ID_CHARS], 400, error.message, error.param)
        lives = self._live.get(back.identity, {})
        if rid in lives:
            return Failed(rid, 409, f"rid {rid!r} is in use by a request that still runs", "rid")
        live = _Live(rid, back, request.stream)
        self._live.setdefault(back.identity, {})[rid] = live
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
            return Failed(live.rid, 400, error.message, error.param)
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

    def _abort(self, identity: bytes, rid: str) -> None:
        """A rid that is not live has had its last word: its Abort crossed it on the way."""
        live = self._live.get(identity, {}).get(rid)
        if live is not None:
            self._drop(live)
            self._answer(live.back, live.terminal(Finish("abort")))

    def _left(self, identity: bytes) -> None:
        lives = list(self._live.get(identity, {}).values())
        if lives:
            log.info("a socket client left; aborting its %d requests", len(lives))
        for live in lives:
            self._drop(live)

    def _drop(self, live: _Live) -> None:
        """End a request from outside its task; the caller has the last word."""
        if live.task is not None:
            live.task.cancel()
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        if live.stream is not None:
            live.stream.close()
        lives = self._live.get(live.back.identity, {})
        if lives.get(live.rid) is live:
            del lives[live.rid]
        if not lives:
            self._live.pop(live.back.identity, None)

    def _keep(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer_request(self, live: _Live, request: Generate) -> None:
        """From the terminal message to `_forget` nothing waits, so an Abort finds both or none."""
        try:
            stream = await self._submit(live, request)
            if isinstance(stream, Failed):
                self._answer(live.back, stream)
            else:
                await self._last_word(live, await self._relay(live, stream))
        except PeerGone:
            log.info("the client of request %r left", live.rid)
        except Exception:  # one request's fault must not end the door for all
            log.exception("request %r of a socket client broke", live.rid)
            self._answer(live.back, Failed(live.rid, 500, "internal error"))
        finally:
            self._forget(live)

    async def _relay(self, live: _Live, stream: RequestStream) -> Done | Failed:
        """Send the rows as they come; the terminal message is returned unsent."""
        async for row in stream:
            live.take(row)
            if row.finish is not None:
                return live.terminal(row.finish)
            delta = live.delta()
            if delta is not None and not self._send(live.back, delta):
                stream.close()
                log.warning("a socket client does not read; request %r aborted", live.rid)
                unread = self._limits.unread_messages
                text = f"the client does not read: {unread} messages wait for it"
                return Failed(live.rid, 408, text)
        stopped = "the server stopped before the answer was complete"
        return _failed(live.rid, Refused(503, stopped, RETRY_AFTER_DRAINING))

    async def _flush(self, back: _Back, message: FlushCache) -> None:
        try:
            pages = await self._front.flush_cache(message.timeout)
            answer = Flushed(message.seq, 200, pages=pages)
        except InvalidRequest as error:
            answer = Flushed(message.seq, 400, error.message)
        except Refused as error:
            answer = Flushed(message.seq, error.status, error.message)
        except Exception:  # as in _answer_request
            log.exception("flushing the cache for a socket client broke")
            answer = Flushed(message.seq, 500, "internal error")
        self._answer(back, answer)

    async def _adapters(self, back: _Back, message: LoadLoRA | UnloadLoRA | ListLoRAs) -> None:
        status, text = 200, ""
        try:
            await self._change_adapters(message)
        except InvalidRequest as error:
            status, text = 400, error.message
        except Refused as error:
            status, text = error.status, error.message
        except Exception:  # as in _answer_request
            log.exception("%s of a socket client broke", type(message).__name__)
            status, text = 500, "internal error"
        names = self._front.adapters.registry.names()
        self._answer(back, LoRAs(message.seq, status, text, names))

    async def _change_adapters(self, message: LoadLoRA | UnloadLoRA | ListLoRAs) -> None:
        match message:
            case LoadLoRA(lora_name=name, lora_path=path, pinned=pinned):
                await self._front.adapters.load(name, path, pinned=pinned)
            case UnloadLoRA(lora_name=name):
                self._front.adapters.unload(name)

    async def _last_word(self, live: _Live, message: Done | Failed) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.stall_seconds
        while not self._send(live.back, message):  # ZeroMQ tells of no single peer's room
            if asyncio.get_running_loop().time() > deadline:
                log.warning("the last word on %r was not taken by its client", live.rid)
                return
            await asyncio.sleep(RETRY_SECONDS)

    def _answer(self, back: _Back, message: ToClient) -> None:
        """Send now or never: an answer that needs no more patience than its asker shows."""
        try:
            if not self._send(back, message):
                log.warning("an answer was dropped: its client does not read")
        except PeerGone:
            log.info("an answer was dropped: its client left")

    def _send(self, back: _Back, message: ToClient) -> bool:
        """False when the client has too much unread; raises PeerGone when it has left."""
        payload = codec.encode_for(message, json=back.json)
        return self._router.send(back.identity, [*back.envelope, payload])


def _failed(rid: str, refused: Refused) -> Failed:
    return Failed(rid, refused.status, refused.message, retry_after=refused.retry_after)


class _Named(msgspec.Struct):
    rid: str = ""


def _rid_of(payload: bytes) -> str:
    """The rid of a message that is wrong otherwise, as far as it can be read."""
    decode = msgspec.json.decode if codec.is_json(payload) else msgspec.msgpack.decode
    try:
        return decode(payload, type=_Named).rid[:MAX_REQUEST_ID_CHARS]
    except (msgspec.DecodeError, RecursionError):
        return ""


def _field_of(error: Exception) -> str | None:
    """The field that msgspec complains of, named as `check_sampling` would name it."""
    path = re.search(r"`\$\.?([^`]*)`$", str(error))
    named = re.search(r"field `([^`]*)`", str(error))
    parts = re.sub(r"\[[^]]*\]", "", path[1]).split(".") if path else []
    names = [name for name in [*parts, *([named[1]] if named else [])] if name]
    if names[:1] == ["sampling"] and len(names) > 1:
        names = names[1:]
    return names[0][:MAX_ERROR_CHARS] if names else None
