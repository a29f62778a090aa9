"""Ranks: the processes of a tensor-parallel model beside the scheduler process, which is rank 0.

Made by __main__.py, used by server.py. Every rank runs every step on its share of the model and
samples the same tokens; only rank 0's count, so ranks send nothing back. A rank that dies ends this
process, and the launcher then ends the rest; when this process dies, the ranks exit.
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

# -P as in launch.py.
COMMAND = (sys.executable, "-P", "-m", "tokenloom.scheduler_proc.rank")
_NOTICE_S = 2.0  # time for _watch to notice a dead rank

log = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 and up; with tensor_parallel 1 there are none and every method does nothing."""

    def __init__(self, config: SchedulerConfig, life: ChildLife) -> None:
        """Start the ranks. Call it from the main thread: the kernel kills them when it ends."""
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
        """Wrap `runner` so that every launch is sent to all ranks first."""
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
        """End this process when a rank dies: its main thread may wait forever in a collective."""
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
            # A dead rank breaks the collectives; if one died, let _watch report it and exit.
            if self._broken.wait(_NOTICE_S):
                threading.Event().wait()
            raise


def _to_rank(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """Connect to a rank with an unbounded queue: frames wait until it binds, none may be lost."""
    check_ipc_path(address)
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket
