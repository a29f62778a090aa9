"""Well-typed messages about what never was, to each receiver: counted, dropped, nobody ends."""

import asyncio
import logging
from pathlib import Path
from typing import cast, get_args

import msgspec
import pytest
from support.scheduling import Bench, prompt

from tokenloom.child_process import ChildProcess, ChildState
from tokenloom.detokenizer_proc.server import _serve
from tokenloom.detokenizer_proc.streams import Streams
from tokenloom.launch import Launcher, StopSignals
from tokenloom.tokenizer_proc.front import Front
from tokenloom.wire import messages
from tokenloom.wire.channel import AsyncMailbox, Outbox
from tokenloom.wire.config import Links, ModelConfig, ServerConfig
from tokenloom.wire.log_limit import LINES, LogLimit
from tokenloom.wire.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenIDOut,
    ChildDied,
    ChildFailed,
    ChildReady,
    Drained,
    Draining,
    DrainReq,
    Finish,
    FlushOut,
    FlushReq,
    LoadLoRAReq,
    LoopStamp,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    SchedulerInfo,
    SchedulerReady,
    StatsOut,
    StatsReq,
    StopMatched,
    StreamOpen,
    StrOut,
    TokenIDOut,
    TokenizedGenerateReq,
    ToLauncher,
    UnloadLoRAReq,
)
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.strays import Strays

INFO = SchedulerInfo(10, 20, 4, 80, 2, 0, "float32", (0,))
STATS = StatsOut(12345, *([0] * 7), 0.5, *([0] * 5))
STRANGE: dict[type, list[msgspec.Struct]] = {
    TokenizedGenerateReq: [
        TokenizedGenerateReq(10, b"abc", SamplingParams()),
        TokenizedGenerateReq(11, b"", SamplingParams()),
        TokenizedGenerateReq(12, b"\1\0\0\0", SamplingParams(), lora_id=999),
        TokenizedGenerateReq(-1, b"\xff\xff\xff\xff", SamplingParams(max_new_tokens=-5)),
    ],
    AbortReq: [AbortReq(12345)],
    StopMatched: [StopMatched(-7)],
    StatsReq: [StatsReq(2**63 - 1)],
    FlushReq: [FlushReq(1, float("nan")), FlushReq(2, float("-inf"))],
    LoadLoRAReq: [LoadLoRAReq(LoRARef(0, "x", "/x"))],
    UnloadLoRAReq: [UnloadLoRAReq(12345)],
    DrainReq: [],  # an order, which makes sense at any time
    BatchTokenIDOut: [
        BatchTokenIDOut([TokenIDOut(5, (1, 2)), TokenIDOut(6, (), Finish("stop"))]),
        BatchTokenIDOut([TokenIDOut(7, (-5, 2**40), None, 0, StreamOpen(b"abc"))] * 2),
    ],
    BatchStrOut: [BatchStrOut([StrOut(5, "x", (1,)), StrOut(-6, "", (), Finish("error"))])],
    SchedulerReady: [SchedulerReady(msgspec.structs.replace(INFO, vocab_size=0))],
    StatsOut: [STATS],
    FlushOut: [FlushOut(12345, True), FlushOut(-1, False)],
    LoRALoaded: [LoRALoaded(12345, True), LoRALoaded(0, False)],
    LoRAUnloaded: [LoRAUnloaded(12345), LoRAUnloaded(0)],
    Drained: [Drained()],
    Draining: [],  # as DrainReq; a Drained behind it is believed
    LoopStamp: [LoopStamp(-1, False, -1, -1.0, relayed) for relayed in (False, True)],
    ChildDied: [ChildDied("nobody", "of old age")],
    ChildReady: [ChildReady("nobody"), ChildReady("scheduler"), ChildReady("tokenizer", "evil")],
    ChildFailed: [ChildFailed("nobody", "x" * 100_000)],
}


def strange_to(union: object) -> list[msgspec.Struct]:
    """Each twice: what happened once need not happen again."""
    return [message for kind in get_args(union) for message in STRANGE[kind] * 2]


def test_all_messages_of_all_links_are_tried() -> None:
    unions = (messages.ToScheduler, messages.ToDetokenizer, messages.ToFront, messages.ToLauncher)
    assert {kind for union in unions for kind in get_args(union)} == set(STRANGE)


class Sent:
    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("message", strange_to(messages.ToFront), ids=repr)
def test_the_front_drops_it(message: messages.ToFront) -> None:
    async def main() -> None:
        front = Front("m", cast(Outbox, Sent()), 4)
        front.dispatch(SchedulerReady(INFO))
        for _ in range(2):
            front.dispatch(message)
        counted = front.strays.total + front.late_rows
        assert counted or isinstance(message, LoopStamp)
        assert front.info == INFO
        assert (front.draining, front.drained.is_set(), front.failed.is_set()) == (False,) * 3

    asyncio.run(main())


def test_the_front_believes_each_end_once() -> None:
    async def main() -> None:
        front = Front("m", cast(Outbox, Sent()), 4)
        front.drain(1.0)
        front.dispatch(Drained())
        assert (front.drained.is_set(), front.strays.total) == (True, 0)
        front.dispatch(Drained())
        assert front.strays.total == 1

    asyncio.run(main())


@pytest.mark.parametrize("message", strange_to(messages.ToScheduler), ids=repr)
def test_the_scheduler_refuses_it_and_goes_on(message: messages.ToScheduler) -> None:
    bench = Bench()
    for _ in range(2):
        bench.scheduler.handle(message)
        bench.scheduler.check()
    rid = bench.submit(prompt(9), 3)
    bench.run()
    assert bench.finishes[rid].reason == "length"
    counts = isinstance(message, LoadLoRAReq | UnloadLoRAReq)
    assert (bench.scheduler.totals.violations > 0) >= counts


class Letters:
    """A mailbox that brings `batch` once, then its end."""

    def __init__(self, batch: list[messages.ToDetokenizer]) -> None:
        self.strays = Strays()
        self._batch = batch

    async def receive(self) -> list[messages.ToDetokenizer]:
        batch, self._batch = self._batch, [Draining(), Drained()]
        return batch


@pytest.mark.parametrize("message", strange_to(messages.ToDetokenizer), ids=repr)
def test_the_detokenizer_drops_it_or_passes_it_on(message: messages.ToDetokenizer) -> None:
    front, scheduler = Sent(), Sent()
    letters = Letters([message, message, STATS])
    mailbox = cast("AsyncMailbox[messages.ToDetokenizer]", letters)
    streams = Streams(lambda ids, _: bytes(ids).decode())
    asyncio.run(_serve(mailbox, cast(Outbox, front), cast(Outbox, scheduler), streams))
    assert front.sent[-1] == Drained(), "it went on to the end of the drain"
    dropped = letters.strays.total + streams.unknown_rows
    assert front.sent[-2] == msgspec.structs.replace(STATS, detokenizer_strays_total=dropped)
    if isinstance(message, BatchTokenIDOut | Drained):
        assert dropped or scheduler.sent
    elif not isinstance(message, StatsOut):
        assert front.sent[:2] == [message, message], "whether it was asked for, the front knows"


class FakeChild:
    name = "scheduler"

    def __init__(self) -> None:
        self.story = [ChildState.STARTING]

    @property
    def state(self) -> ChildState:
        return self.story[-1]

    def move(self, state: ChildState) -> None:
        self.story.append(state)


def test_the_launcher_drops_it(tmp_path: Path) -> None:
    config = ServerConfig(model=ModelConfig(model="x"))
    launcher = Launcher(config, Links(str(tmp_path)), StopSignals())
    child = FakeChild()
    launcher._children["scheduler"] = cast(ChildProcess, child)
    strange = strange_to(ToLauncher)
    outbox = Outbox(launcher._context, launcher._links.launcher)
    for message in [ChildReady("scheduler"), *strange]:
        outbox.send(message)
    while launcher._mailbox.strays.total < len(strange):
        before = launcher._mailbox.strays.total
        launcher._hear(5000)
        assert launcher._mailbox.strays.total > before
    assert child.story == [ChildState.STARTING, ChildState.READY]
    assert (launcher._url, launcher._last_words) == ("", {})
    outbox.close()
    launcher._mailbox.close()
    launcher._context.term()


def test_a_flood_of_malformed_frames_is_a_few_lines_with_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strays = Strays()
    for number in range(20_000):
        strays.drop_frame(b"x" * number, ValueError("what it is not"))
    assert strays.malformed == 20_000
    assert len(caplog.records) <= 4 * LINES


def test_lines_that_are_left_out_are_counted_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    caplog.set_level(logging.INFO)
    limit = LogLimit(logging.getLogger("test"), lines=2, seconds=10, clock=lambda: now)
    for number in range(5):
        limit.warning("number %d", number)
    now = 109.9
    limit.info("number %d", 5)
    now = 110.0
    limit.info("number %d", 6)
    limit.info("number %d", 7)
    assert caplog.messages == [
        "number 0",
        "number 1",
        "number 6 (and 4 more like it before)",
        "number 7",
    ]
    assert limit.count == 8
