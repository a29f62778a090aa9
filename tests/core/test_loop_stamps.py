"""The marks that the scheduler's loop leaves in passing, and the thread that sends them."""

from dataclasses import dataclass, field
from pathlib import Path

import zmq
from support.scheduling import Bench

from tokenloom.scheduler_proc.event_loop import event_loop
from tokenloom.scheduler_proc.loop_stamps import LoopStamps
from tokenloom.scheduler_proc.worker_batch import LaunchedStep, ModelWorkerBatch
from tokenloom.wire import codec
from tokenloom.wire.channel import Mailbox
from tokenloom.wire.config import Links
from tokenloom.wire.messages import (
    DrainReq,
    LoopStamp,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
)
from tokenloom.wire.sampling import SamplingParams

DEADLINE_MS = 20_000


@dataclass
class Watcher:
    """Between the loop and what it uses: what a stamp would say at each moment."""

    bench: Bench
    calls: list[list[ToScheduler]]
    stamps: LoopStamps | None = None
    asked: list[LoopStamp] = field(default_factory=list)
    launched: list[LoopStamp] = field(default_factory=list)
    sent: list[ToDetokenizer] = field(default_factory=list)

    def now(self) -> LoopStamp:
        assert self.stamps is not None
        return self.stamps.stamp(relayed=False)

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        self.asked.append(self.now())
        assert self.now().waiting == (timeout_ms != 0)
        return self.calls.pop(0) if self.calls else []

    @property
    def loras(self) -> object:
        return self.bench.runner.loras

    def prepare(self) -> bool:
        return False

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep:
        self.launched.append(self.now())
        return self.bench.runner.launch(batch)

    def send(self, message: ToDetokenizer) -> None:
        self.sent.append(message)


def test_the_loop_leaves_its_marks(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stamps = LoopStamps(context, Links(str(tmp_path)))
    params = SamplingParams(max_new_tokens=3, seed=0, ignore_eos=True)
    request = TokenizedGenerateReq(1, b"\5\0\0\0\6\0\0\0", params)
    bench = Bench()
    watcher = Watcher(bench, [[request], [DrainReq()]], stamps)
    event_loop(bench.scheduler, stamps.runner(watcher), stamps.inbox(watcher), watcher)
    assert [one.turns for one in watcher.asked] == list(range(1, len(watcher.asked) + 1))
    assert watcher.asked[0].waiting, "idle at first"
    assert not watcher.asked[1].waiting, "not while it serves"
    assert [(one.tokens, one.waiting) for one in watcher.launched] == [
        (2, False),
        (1, False),
        (1, False),
    ]
    assert not stamps.waiting
    stamps.start()
    stamps.close()
    context.term()


def test_stamps_go_to_the_front_and_through_the_detokenizer(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(str(tmp_path))
    front = Mailbox(context, links.front, codec.to_front())
    detokenizer = Mailbox(context, links.detokenizer, codec.to_detokenizer())
    stamps = LoopStamps(context, links)
    stamps.turns, stamps.tokens = 7, 3
    stamps.start()
    try:
        for mailbox, relayed in ((front, False), (detokenizer, True)):
            (stamp,) = mailbox.receive(DEADLINE_MS)
            assert isinstance(stamp, LoopStamp)
            assert (stamp.turns, stamp.tokens, stamp.relayed) == (7, 3, relayed)
            assert stamp.cpu_s > 0.0
    finally:
        stamps.close()
        front.close()
        detokenizer.close()
        context.term()
