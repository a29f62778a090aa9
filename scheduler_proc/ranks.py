"""The ranks beside the scheduler process, which is the first: their processes and their work.

Made by __main__.py, used by server.py. Each rank runs every step on its share of the model, so a
step begins when all have it, and nothing comes back: only the first rank's tokens count, and the
others choose the same. One that ends takes this process with it, and the launcher the rest; when
this one ends, they do.
"""

import logging
import os
import sys
import threading

import zmq

from ..child_process import ChildProcess, how_it_ended
from ..wire.channel import check_ipc_path
from ..wire.child import ChildLife
from ..wire.config import SchedulerConfig
from . import batch_codec
from .event_loop import Adapters, Runner
from .worker_batch import LaunchedStep, ModelWorkerBatch

# As the launcher starts its children.
COMMAND = (sys.executable, "-P", "-m", "tokenloom.scheduler_proc.rank")
_NOTICE_S = 2.0  # in which a rank's end is noticed

log = logging.getLogger(__name__)


class Ranks:
    """All but the first. Of a model in one piece there are none, and nothing is done."""

    def __init__(self, config: SchedulerConfig, life: ChildLife) -> None:
        """Starts them. Call it from the main thread: the kernel ends them with it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._life = life
        self._closing = False
        self._broken = threading.Event()  # a rank has ended
        self._children: list[ChildProcess] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(1, config.execution.tensor_parallel):
            self._sockets.append(_to_rank(self._context, config.links.rank(rank)))
            child = ChildProcess(f"rank{rank}", (*COMMAND, str(rank)), config)
            self._children.append(child)
            threading.Thread(target=self._watch, args=(child,), daemon=True).start()

    def lead(self, runner: Runner) -> Runner:
        """The runner that has all ranks compute what `runner` does."""
        if not self._sockets:
            return runner
        return _LeadRunner(runner, self._sockets, self._broken)

    def close(self) -> None:
        self._closing = True
        for socket in self._sockets:
            socket.close()
        for child in self._children:
            child.close()
        self._context.term()

    def _watch(self, child: ChildProcess) -> None:
        """The main thread may be waiting for the dead rank's share of a sum, for ever."""
        status = child.wait()
        if self._closing:
            return
        self._broken.set()
        words = f"{child.name} ended: {how_it_ended(status)}"
        log.error("%s", words)
        self._life.failed(words)
        os._exit(1)


class _LeadRunner:
    def __init__(
        self, runner: Runner, sockets: "list[zmq.Socket[bytes]]", broken: threading.Event
    ) -> None:
        self._runner = runner
        self._sockets = sockets
        self._broken = broken

    @property
    def loras(self) -> Adapters:
        return self._runner.loras

    def prepare(self) -> bool:
        return self._runner.prepare()

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep:
        frame = batch_codec.encode(batch)
        for socket in self._sockets:
            socket.send(frame, zmq.DONTWAIT)
        try:
            return self._runner.launch(batch)
        except RuntimeError:
            # A rank that died breaks the sums of the others: _watch says so, and ends us meanwhile.
            if self._broken.wait(_NOTICE_S):
                threading.Event().wait()
            raise


def _to_rank(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """What is sent waits for the rank to come. Nothing may be lost, so nothing is bounded."""
    check_ipc_path(address)
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket
