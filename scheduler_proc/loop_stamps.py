"""What the scheduler's loop is doing, told to the front once a second by a thread beside it.

Made by server.py. The loop leaves its marks in passing, through the mailbox and the runner that it
uses anyway. The thread shows that the process is not stopped, its stamps whether the loop gets on:
a long step says nothing by itself. The front judges (tokenizer_proc/progress.py).
"""

import threading
import time

import zmq

from ..wire.channel import Outbox
from ..wire.config import Links
from ..wire.messages import LoopStamp, ToScheduler
from ..wire.slices import ask_for_short_slices
from .event_loop import Adapters, Inbox, Runner
from .worker_batch import LaunchedStep, ModelWorkerBatch

PERIOD_S = 1.0


class LoopStamps:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", links: Links) -> None:
        self.turns = 0
        self.waiting = False
        self.tokens = 0  # of the step launched last
        self._front = Outbox(context, links.front)
        self._detokenizer = Outbox(context, links.detokenizer)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="loop-stamps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def inbox(self, inbox: Inbox) -> Inbox:
        """`inbox` for the loop, which begins a turn whenever it looks into it."""
        return _MarkedInbox(inbox, self)

    def runner(self, runner: Runner) -> Runner:
        """`runner` for the loop; the sizes of its steps are noted."""
        return _MarkedRunner(runner, self)

    def stamp(self, *, relayed: bool) -> LoopStamp:
        return LoopStamp(self.turns, self.waiting, self.tokens, time.process_time(), relayed)

    def close(self) -> None:
        """The last stamps may be lost: who would read them is ending too."""
        self._closing.set()
        self._thread.join()
        self._front.close(linger_ms=0)
        self._detokenizer.close(linger_ms=0)

    def _send_all(self) -> None:
        ask_for_short_slices()  # between threads that compute it would come late
        while True:
            self._front.send(self.stamp(relayed=False))
            self._detokenizer.send(self.stamp(relayed=True))
            if self._closing.wait(PERIOD_S):
                return


class _MarkedInbox:
    def __init__(self, inbox: Inbox, stamps: LoopStamps) -> None:
        self._inbox = inbox
        self._stamps = stamps

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        self._stamps.turns += 1
        if timeout_ms == 0:
            return self._inbox.receive(0)
        self._stamps.waiting = True
        try:
            return self._inbox.receive(timeout_ms)
        finally:
            self._stamps.waiting = False


class _MarkedRunner:
    def __init__(self, runner: Runner, stamps: LoopStamps) -> None:
        self._runner = runner
        self._stamps = stamps

    @property
    def loras(self) -> Adapters:
        return self._runner.loras

    def prepare(self) -> bool:
        return self._runner.prepare()

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep:
        self._stamps.tokens = sum(batch.extend_lens)
        return self._runner.launch(batch)
