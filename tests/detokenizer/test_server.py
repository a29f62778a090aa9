"""The detokenizer's serve loop over real sockets: batches in, text and stop words out."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tokenloom.detokenizer_proc.server import model_streams, serve
from tokenloom.detokenizer_proc.streams import Streams
from tokenloom.model_files.resolve import resolve_model
from tokenloom.model_files.tokenizer import load_tokenizer
from tokenloom.wire import codec
from tokenloom.wire.channel import AsyncMailbox, Outbox
from tokenloom.wire.config import Links
from tokenloom.wire.messages import (
    BatchStrOut,
    BatchTokenIDOut,
    Drained,
    Draining,
    Finish,
    FlushOut,
    LoopStamp,
    LoRALoaded,
    LoRAUnloaded,
    SchedulerInfo,
    SchedulerReady,
    StopMatched,
    StreamOpen,
    StrOut,
    ToFront,
    TokenIDOut,
    ToScheduler,
)

DEADLINE = 10.0
READY = SchedulerReady(SchedulerInfo(10, 20, 4, 80, 2, 0, "float32", (0,)))


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    return bytes(ids).decode("utf-8", "replace")


class Peers:
    """The scheduler and the front, as far as the detokenizer sees them."""

    def __init__(self, links: Links, context: zmq.asyncio.Context) -> None:
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self.front = AsyncMailbox(context, links.front, codec.to_front())
        self.scheduler = AsyncMailbox(context, links.scheduler, codec.to_scheduler())
        self.outbox = Outbox(plain, links.detokenizer)

    def send(self, message: msgspec.Struct) -> None:
        self.outbox.send(message)

    async def at_front(self, count: int) -> list[ToFront]:
        return await gather(self.front.receive, count)

    async def at_scheduler(self, count: int) -> list[ToScheduler]:
        return await gather(self.scheduler.receive, count)

    def close(self) -> None:
        for end in (self.front, self.scheduler, self.outbox):
            end.close()


async def gather(receive: Callable[[], object], count: int) -> list:  # type: ignore[type-arg]
    got: list[object] = []
    async with asyncio.timeout(DEADLINE):
        while len(got) < count:
            got += await receive()  # type: ignore[misc]
    return got


@asynccontextmanager
async def serving(run_dir: Path) -> AsyncIterator[tuple[Peers, "asyncio.Task[None]"]]:
    links, ready = Links(str(run_dir)), asyncio.Event()
    context = zmq.asyncio.Context()
    peers = Peers(links, context)
    task = asyncio.create_task(serve(links, Streams(decode), ready.set))
    try:
        async with asyncio.timeout(DEADLINE):
            await ready.wait()
        yield peers, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        peers.close()
        context.term()


def opened(*stop: str) -> StreamOpen:
    return StreamOpen(array("i", [65]).tobytes(), stop)


def test_batches_become_text_and_drained_ends_the_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (peers, task):
            peers.send(READY)
            half, rest = tuple("🙂".encode()[:2]), tuple("🙂".encode()[2:])
            start = [
                TokenIDOut(1, half, None, 4, opened()),
                TokenIDOut(2, (97,), None, 0, opened("bc")),
            ]
            peers.send(BatchTokenIDOut(start))
            peers.send(BatchTokenIDOut([TokenIDOut(7, (97,))]))  # unknown: no StrOut, no batch
            peers.send(FlushOut(3, True, pages=9))
            peers.send(LoRALoaded(4, True, rank=8))
            peers.send(LoRAUnloaded(3))
            peers.send(LoopStamp(5, False, 64, 1.5, True))
            length = Finish("length")
            peers.send(BatchTokenIDOut([TokenIDOut(1, rest, length, 4), TokenIDOut(2, (98, 99))]))
            peers.send(Drained())  # nobody drains: it is dropped
            peers.send(Draining())
            peers.send(Drained())
            got = await peers.at_front(8)
            assert got == [
                READY,
                BatchStrOut([StrOut(1, "", half, None, 4), StrOut(2, "a", (97,))]),
                FlushOut(3, True, pages=9),
                LoRALoaded(4, True, rank=8),
                LoRAUnloaded(3),
                LoopStamp(5, False, 64, 1.5, True),
                BatchStrOut(
                    [
                        StrOut(1, "🙂", rest, length, 4),
                        StrOut(2, "", (98, 99), Finish("stop", matched="bc")),
                    ]
                ),
                Drained(),
            ]
            assert await peers.at_scheduler(1) == [StopMatched(2)]
            async with asyncio.timeout(DEADLINE):
                await task

    asyncio.run(scenario())


def test_the_model_own_special_tokens_can_be_stop_strings() -> None:
    path = resolve_model(None, None)
    ids = tuple(load_tokenizer(path).encode("Hello<|im_end|> there").ids)
    for skip in (True, False):
        opened = StreamOpen(b"", ("<|im_end|>",), skip)
        (out,) = model_streams(path).take([TokenIDOut(1, ids, None, 0, opened)]).rows
        assert (out.text, out.finish) == ("Hello", Finish("stop", matched="<|im_end|>"))
