"""LoopStamps: report the state of the scheduler's loop to the front once a second, from a thread.

Made by server.py. Wrappers around the loop's mailbox and runner record its turns and step sizes. A
stamp that arrives shows that the process runs; its contents show whether the loop makes progress,
since a step may be long. tokenizer_proc/progress.py judges them.
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
        self.tokens = 0  # in the step launched last
        self._front = Outbox(context, links.front)
        self._detokenizer = Outbox(context, links.detokenizer)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="loop-stamps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def inbox(self, inbox: Inbox) -> Inbox:
        """Wrap the loop's mailbox to count turns and note when it waits."""
        return _MarkedInbox(inbox, self)

    def runner(self, runner: Runner) -> Runner:
        """Wrap the loop's runner to note the tokens of each step."""
        return _MarkedRunner(runner, self)

    def stamp(self, *, relayed: bool) -> LoopStamp:
        return LoopStamp(self.turns, self.waiting, self.tokens, time.process_time(), relayed)

    def close(self) -> None:
        """Stop the thread; drop stamps not sent yet, as their receivers are ending too."""
        self._closing.set()
        self._thread.join()
        self._front.close(linger_ms=0)
        self._detokenizer.close(linger_ms=0)

    def _send_all(self) -> None:
        ask_for_short_slices()  # compute threads would delay the stamps
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
