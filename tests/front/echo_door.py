"""A front with fake neighbours: an encoder of bytes, and a scheduler and detokenizer that echo.

The fake model has 256 tokens, the bytes; its answer to a prompt is the prompt, one token a row,
then finish "stop" with token 0 (or "length" when max_new_tokens comes first).
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tokenloom.tokenizer_proc.doors.http import HttpDoor
from tokenloom.tokenizer_proc.doors.phases import RULES, Rules
from tokenloom.tokenizer_proc.front import Front
from tokenloom.tokenizer_proc.server import HttpServer, listen, url_of
from tokenloom.wire import codec
from tokenloom.wire.client_messages import ChatMessage
from tokenloom.wire.door_config import DoorConfig
from tokenloom.wire.lora_config import LoRAConfig
from tokenloom.wire.messages import (
    AbortReq,
    BatchStrOut,
    Drained,
    DrainReq,
    Finish,
    FlushOut,
    FlushReq,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    SchedulerInfo,
    SchedulerReady,
    StatsOut,
    StatsReq,
    StrOut,
    TokenizedGenerateReq,
    UnloadLoRAReq,
)

T = TypeVar("T")
MODEL = "echo-1"
DOORS = DoorConfig()
NO_LORA = LoRAConfig()
INFO = SchedulerInfo(
    vocab_size=256,
    context_length=256,
    page_size=16,
    max_total_tokens=1024,
    max_running_requests=8,
    chunked_prefill_size=64,
    dtype="float32",
    eos_token_ids=(0,),
)


class ByteEncoder:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class ByteRenderer:
    def encode(self, messages: list[ChatMessage]) -> list[int]:
        return list("|".join(f"{m.role}:{m.content}" for m in messages).encode())


@dataclass
class EchoScheduler:
    """Stands in for the Outbox to the scheduler; answers straight into the front."""

    hold: bool = False  # True: rows come only when the test says so
    flush: tuple[bool, str, int] | None = (True, "", 7)  # None: no answer
    sent: list[msgspec.Struct] = field(default_factory=list)
    front: Front | None = None
    live: dict[int, TokenizedGenerateReq] = field(default_factory=dict)
    hold_loads: bool = False  # True: LoRALoaded comes only when the test says so
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)  # path -> status and reason
    there: set[int] = field(default_factory=set)  # lora_ids that it has
    leaving: set[int] = field(default_factory=set)  # those that end with their last request
    _decoder: Any = field(default_factory=codec.to_scheduler)

    def send(self, message: msgspec.Struct) -> None:
        message = self._decoder.decode(codec.encode(message))
        self.sent.append(message)
        soon = asyncio.get_running_loop().call_soon
        match message:
            case LoadLoRAReq(ref=ref):
                if not self.hold_loads:
                    soon(self.loaded, ref)
            case UnloadLoRAReq(lora_id=lora_id):
                assert lora_id in self.there - self.leaving
                self.leaving.add(lora_id)
                soon(self._free)
            case TokenizedGenerateReq():
                assert message.lora_id in {0} | self.there - self.leaving
                self.live[message.rid] = message
                if not self.hold:
                    soon(self._step, message.rid, 0)
            case AbortReq(rid=rid):
                soon(self.row, StrOut(rid, "", (), Finish("abort")))
            case StatsReq(seq=seq):
                stats = StatsOut(seq, 7, 1, 2, 3, 4, 5, 6, 0.5, 8, 9, 10, 11, 0, 12, 13, 14)
                soon(self.front.dispatch, stats)
            case FlushReq(seq=seq) if self.flush is not None:
                soon(self.front.dispatch, FlushOut(seq, *self.flush))
            case DrainReq():
                if not self.hold:
                    soon(self.front.dispatch, Drained())

    def row(self, row: StrOut) -> None:
        if row.finish is not None:
            self.live.pop(row.rid, None)
        self.front.dispatch(BatchStrOut([row]))
        self._free()

    def loaded(self, ref: LoRARef) -> None:
        """The answer to a load, good or bad."""
        if ref.path in self.bad:
            status, why = self.bad[ref.path]
            self.front.dispatch(LoRALoaded(ref.lora_id, False, why, status))
        else:
            self.there.add(ref.lora_id)
            self.front.dispatch(LoRALoaded(ref.lora_id, True, rank=8))

    def _free(self) -> None:
        used = {request.lora_id for request in self.live.values()}
        for lora_id in sorted(self.leaving - used):
            self.leaving.discard(lora_id)
            self.there.discard(lora_id)
            self.front.dispatch(LoRAUnloaded(lora_id))

    def _step(self, rid: int, done: int) -> None:
        request = self.live.get(rid)
        if request is None:
            return
        prompt = memoryview(request.input_ids).cast("i").tolist()
        finish = None
        if done + 1 == request.sampling.max_new_tokens:
            finish = Finish("length")
        elif done + 1 == len(prompt):
            finish = Finish("stop", 0)
        token = prompt[done % len(prompt)]
        cached = len(prompt) // 2 if done == 0 else 0
        self.row(StrOut(rid, chr(token), (token,), finish, cached))
        if finish is None:
            asyncio.get_running_loop().call_soon(self._step, rid, done + 1)

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.sent if isinstance(message, kind)]


class Exchange:
    """One HTTP request in flight at the ASGI level."""

    def __init__(
        self, app: HttpDoor, method: str, path: str, body: list[bytes], headers: dict[str, str]
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.done = False
        self.stalled = False  # True: the client takes no more bytes
        self._pieces = body
        self._left = asyncio.Event()
        self._news = asyncio.Condition()
        self._unread = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.stalled:
            await self._unread.wait()
        if message["type"] == "http.response.start":
            assert not self.status, "two answers to one request"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert not self.done, "bytes after the end of the answer"
            self.body += message["body"]
            self.done = not message.get("more_body", False)
        async with self._news:
            self._news.notify_all()

    def leave(self) -> None:
        self._left.set()

    def read_on(self) -> None:
        self.stalled = False
        self._unread.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(condition)

    async def end(self) -> "Exchange":
        async with asyncio.timeout(10):
            await self.task
        return self

    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        body = self.json()
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
        return body["error"]

    def events(self) -> list[Any]:
        """The frames of a stream, decoded; [DONE] as the string it is."""
        assert self.body.endswith(b"\n\n")
        frames = []
        for frame in self.body.decode().removesuffix("\n\n").split("\n\n"):
            assert frame.startswith("data: ")
            assert "\n" not in frame
            data = frame.removeprefix("data: ")
            frames.append(data if data == "[DONE]" else json.loads(data))
        return frames


class Door:
    """The HTTP door over a front with fake neighbours."""

    def __init__(
        self, max_queued: int = 64, max_body_bytes: int = 4096, lora: LoRAConfig = NO_LORA
    ) -> None:
        self.scheduler = EchoScheduler()
        self.front = Front(MODEL, self.scheduler, max_queued, lora)
        self.scheduler.front = self.front
        self.app = HttpDoor(self.front, max_body_bytes)

    def start(self, info: SchedulerInfo = INFO) -> "Door":
        self.front.use_text(ByteEncoder(), ByteRenderer())
        self.front.dispatch(SchedulerReady(info))
        return self

    def open(
        self,
        method: str,
        path: str,
        payload: object = None,
        headers: dict[str, str] | None = None,
    ) -> Exchange:
        """Start a request inside a running loop; bytes, or a list of pieces, are sent as is."""
        if payload is None:
            payload = b""
        elif isinstance(payload, dict):
            payload = json.dumps(payload).encode()
        pieces = [payload] if isinstance(payload, bytes) else list(payload)
        return Exchange(self.app, method, path, pieces, headers or {})

    def call(
        self,
        method: str,
        path: str,
        payload: object = None,
        headers: dict[str, str] | None = None,
    ) -> Exchange:
        """A whole request and its answer, outside of a loop."""

        async def scenario() -> Exchange:
            return await self.open(method, path, payload, headers).end()

        return self.run(scenario())

    def post(self, path: str, payload: object) -> Exchange:
        return self.call("POST", path, payload)

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(scenario)


async def turn() -> None:
    """Let everything that can run do one step."""
    await asyncio.sleep(0)


async def submitted(door: Door, count: int = 1) -> None:
    """Until the scheduler got `count` requests."""
    async with asyncio.timeout(10):
        while len(door.scheduler.of(TokenizedGenerateReq)) < count:
            await turn()


class Served:
    """The door on a real uvicorn, in a thread of its own."""

    def __init__(self, doors: DoorConfig = DOORS, rules: Rules = RULES) -> None:
        self.door = Door(max_body_bytes=doors.max_body_bytes)
        self._doors = doors
        self._rules = rules
        (self.listener,) = listen("127.0.0.1", 0)
        self.url = url_of("127.0.0.1", self.listener)
        self.address: tuple[str, int] = self.listener.getsockname()
        self._up = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._up.wait(20)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.door.start()
        self.http = HttpServer.over(self.door.front, self._doors, self._rules)
        self._up.set()
        await self.http.serve([self.listener])

    def stop(self) -> None:
        self.http.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
