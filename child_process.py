"""ChildProcess: a process with a config on its standard input, its state, and how it ended.

Used by the launcher for its children, and by the scheduler process for its ranks. The pipe to
standard input stays open while the parent lives; a child exits when it closes.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

import msgspec

_REAP_S = 5.0  # a killed process is gone in less, unless the kernel itself is stuck

# Only the launcher downloads, so children need no token; with PYTHONINSPECT a child would never
# exit.
_NOT_FOR_CHILDREN = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "PYTHONINSPECT"})


log = logging.getLogger(__name__)


class ChildState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EXITED = "exited"


MOVES = {
    ChildState.STARTING: {ChildState.READY, ChildState.EXITED},
    ChildState.READY: {ChildState.DRAINING, ChildState.EXITED},
    ChildState.DRAINING: {ChildState.EXITED},
    ChildState.EXITED: set(),
}


class IllegalMove(RuntimeError):
    """A transition between child states that MOVES does not allow."""


class ChildProcess:
    def __init__(self, name: str, command: Sequence[str], config: msgspec.Struct) -> None:
        """Start `command` and hand it `config` as one line of JSON."""
        self.name = name
        self.story = [ChildState.STARTING]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            bufsize=0,
            env={key: value for key, value in os.environ.items() if key not in _NOT_FOR_CHILDREN},
            # A group of its own: Ctrl-C in the terminal is the launcher's to understand, and a
            # child is killed together with whatever it started itself.
            process_group=0,
        )
        assert self._process.stdin is not None
        # A dead child cannot read; the next reap returns how it ended.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")

    @property
    def state(self) -> ChildState:
        return self.story[-1]

    def move(self, state: ChildState) -> None:
        if state not in MOVES[self.state]:
            story = " -> ".join(step.name for step in self.story)
            raise IllegalMove(f"{self.name}: {story} cannot become {state.name}")
        self.story.append(state)

    def reap(self) -> int | None:
        """Return the exit status if the process ended since the last call; -N for signal N."""
        if self.state is ChildState.EXITED:
            return None
        status = self._process.poll()
        if status is not None:
            self.move(ChildState.EXITED)
        return status

    def wait(self) -> int:
        """Block until the process ends; return its exit status, -N for signal N."""
        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its group. Does nothing if it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe and wait for the killed process to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            log.error("%s (pid %d) does not die of SIGKILL", self.name, self._process.pid)


def how_it_ended(status: int) -> str:
    """Describe an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (often: out of memory)" if -status == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
