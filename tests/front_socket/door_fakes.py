"""A front whose answers the test writes, a door before it, and a client that speaks raw ZeroMQ."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokenloom.tokenizer_proc.doors.router import DoorLimits
from tokenloom.tokenizer_proc.doors.socket import SocketDoor
from tokenloom.tokenizer_proc.labels import NO_LABELS, Labels
from tokenloom.tokenizer_proc.lora_registry import NoSuchAdapter
from tokenloom.wire import codec
from tokenloom.wire.client_messages import ChatMessage, ToClient
from tokenloom.wire.messages import Finish, StrOut
from tokenloom.wire.sampling import InvalidRequest, SamplingParams, check_sampling

DEADLINE_S = 20.0
VOCAB = 1000


def run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds; the caller's deadline bounds it."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


class FakeStream:
    """The rows that the test pushes; ends like the front's own after a finish or a close."""

    def __init__(self, input_ids: list[int], sampling: SamplingParams) -> None:
        self.input_ids = input_ids
        self.sampling = sampling
        self.labels = NO_LABELS
        self.lora_id = 0
        self.prompt_tokens = len(input_ids)
        self.closed = False
        self.finished = False
        self.aborted = False
        self.answers_aborts = True
        self.held_text = ""
        self._rows: asyncio.Queue[StrOut | None] = asyncio.Queue()

    def push(self, text: str, ids: tuple[int, ...] = (), finish: Finish | None = None) -> None:
        self._rows.put_nowait(StrOut(0, text, ids, finish, cached_tokens=3))

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> StrOut:
        row = None if self.closed or self.finished else await self._rows.get()
        if row is None:
            raise StopAsyncIteration
        self.finished = row.finish is not None
        return row

    def abort(self) -> None:
        """As the scheduler and the detokenizer answer it: a last row with the text held back."""
        self.aborted = True
        if self.answers_aborts:
            self.push(self.held_text, (), Finish("abort"))

    def close(self) -> None:
        self.closed = True
        self._rows.put_nowait(None)


class FakeRegistry:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def names(self) -> list[str]:
        return list(self.known)


class FakeAdapters:
    """Adapters whose lora_id is the place of their name, from 1."""

    def __init__(self) -> None:
        self.registry = FakeRegistry()
        self.pinned: set[str] = set()
        self.in_use = 0

    async def load(self, name: str, path: str, *, pinned: bool) -> None:
        if not path.startswith("/"):
            raise InvalidRequest("lora_path", "no such place")
        if path == "/bug":
            raise RuntimeError("a bug")
        self.registry.known[name] = path
        if pinned:
            self.pinned.add(name)

    def unload(self, name: str) -> None:
        if self.registry.known.pop(name, None) is None:
            raise NoSuchAdapter(name, self.registry.names())

    @asynccontextmanager
    async def using(self, names: list[str | None]) -> AsyncIterator[list[int]]:
        for name in names:
            if name is not None and name not in self.registry.known:
                raise NoSuchAdapter(name, self.registry.names())
        self.in_use += 1
        try:
            yield [0 if name is None else 1 + self.registry.names().index(name) for name in names]
        finally:
            self.in_use -= 1


class FakeFront:
    model_name = "fake-model"
    ready = True
    recommended: SamplingParams | None = None

    def __init__(self) -> None:
        self.adapters = FakeAdapters()
        self.streams: list[FakeStream] = []
        self.trouble: Exception | None = None
        self.slow: asyncio.Event | None = (
            None  # texts are encoded and the cache flushed when it is set
        )
        self.on_submit: Callable[[FakeStream], None] | None = None

    async def encode_texts(self, texts: list[str]) -> list[list[int]]:
        if self.slow is not None:
            await self.slow.wait()
        return [[ord(char) % VOCAB for char in text] for text in texts]

    async def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        (ids,) = await self.encode_texts(["|".join(f"{m.role}:{m.content}" for m in messages)])
        return ids

    async def flush_cache(self, timeout_s: float) -> int:
        if self.slow is not None:
            await self.slow.wait()
        if self.trouble is not None:
            raise self.trouble
        return round(timeout_s * 100)

    def submit(
        self,
        input_ids: list[int],
        sampling: SamplingParams,
        labels: Labels = NO_LABELS,
        lora_id: int = 0,
    ) -> FakeStream:
        if self.trouble is not None:
            raise self.trouble
        check_sampling(sampling, VOCAB)
        if not input_ids:
            raise InvalidRequest("input_ids", "the prompt is empty")
        stream = FakeStream(input_ids, sampling)
        stream.labels = labels
        stream.lora_id = lora_id
        self.streams.append(stream)
        if self.on_submit is not None:
            self.on_submit(stream)
        return stream

    async def stream(self, index: int) -> FakeStream:
        """The `index`-th submitted request, once it is there."""
        await until(lambda: len(self.streams) > index)
        return self.streams[index]


class RawClient:
    """A DEALER (or REQ) without our client package."""

    def __init__(self, address: str, kind: int = zmq.DEALER, *, json: bool = False) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._json = json
        self.socket.connect(address)

    async def say(self, **fields: object) -> None:
        encode = msgspec.json.encode if self._json else msgspec.msgpack.encode
        await self.socket.send(encode(fields))

    async def hear(self) -> ToClient:
        frame = await self.socket.recv()
        assert codec.is_json(frame) == self._json
        return codec.decode_to_client(frame)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Served:
    """One door and the front behind it, with raw clients to come."""

    def __init__(self, front: FakeFront, door: SocketDoor) -> None:
        self.front = front
        self.door = door
        self.address = door.address
        self._clients: list[RawClient] = []

    def client(self, kind: int = zmq.DEALER, *, json: bool = False) -> RawClient:
        client = RawClient(self.address, kind, json=json)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def served(
    place: Path | str, limits: DoorLimits | None = None, front: FakeFront | None = None
) -> AsyncIterator[Served]:
    """A door on an ipc path inside `place`, or on the address that `place` is."""
    address = place if isinstance(place, str) else f"ipc://{place}/door.sock"
    front = front or FakeFront()
    door = SocketDoor(front, address, limits or DoorLimits())
    serving = asyncio.create_task(door.serve())
    setup = Served(front, door)
    try:
        yield setup
        assert not serving.done(), "the door stopped"
    finally:
        setup.close_clients()
        serving.cancel()
        await asyncio.wait([serving])


@contextmanager
def served_in_thread(place: Path | str, front: FakeFront | None = None) -> Iterator[Served]:
    """As `served`, for tests of programs that block."""
    ready: list[Served] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with served(place, front=front) as setup:
            ready.append(setup)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert up.wait(DEADLINE_S)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def wait_until(condition: Callable[[], object]) -> None:
    """As `until`, for tests of programs that block."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
