"""The launcher of one server: flags -> config -> three children -> supervise -> drain.

`tokenloom serve`, or `python launch.py` from a checkout. Owns the child processes, the run
directory and the exit status: 0 for a requested stop, 1 for a failed start, an unplanned death or a
drain that does not end, 2 for bad flags, 128 + N when signal N cuts a start or a drain short.
Imports no *_proc package, so the parent stays small and never loads torch.
"""

import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Self

import msgspec
import zmq

from tokenloom.child_process import ChildProcess, ChildState, how_it_ended
from tokenloom.flags import parse_flags
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.resolve import model_name, resolve_model
from tokenloom.run_dir import NoRunDirectory, run_directory
from tokenloom.wire import codec
from tokenloom.wire import log as log_format
from tokenloom.wire.channel import AddressTooLong, CannotBind, Mailbox, Outbox
from tokenloom.wire.config import (
    DetokenizerConfig,
    FrontConfig,
    Links,
    SchedulerConfig,
    ServerConfig,
)
from tokenloom.wire.messages import ChildDied, ChildFailed, ChildReady, ToLauncher

FRONT = "tokenizer"
# -P: children do not import from the directory in which the server is started.
COMMANDS: Mapping[str, Sequence[str]] = {
    name: (sys.executable, "-P", "-m", f"tokenloom.{name}_proc")
    for name in ("scheduler", "detokenizer", FRONT)
}
POLL_MS = 100  # how soon a death or a signal is noticed
LAST_WORDS_MS = 200  # how long to wait for a message that a dead child has sent
DRAIN_GRACE_S = 4.0  # for processes to exit after the last request
FAREWELL_S = 2.0  # for the front to end its streams after a death, before all is killed
FAREWELL_POLL_MS = 10

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    status = launch(parse_flags(argv))
    log_format.let_go()
    return status


def launch(config: ServerConfig) -> int:
    """Resolve the model and serve until stopped; return the exit status.

    Call it from the main thread, which receives signals.
    """
    log_format.configure("launcher", config.runtime.log_level)
    try:
        path = resolve_model(config.model.model, config.model.revision)
        name = config.model.served_model_name or model_name(path, config.model.model)
    except ModelError as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    model = msgspec.structs.replace(config.model, model=path, served_model_name=name)
    return serve(msgspec.structs.replace(config, model=model))


def serve(config: ServerConfig, commands: Mapping[str, Sequence[str]] = COMMANDS) -> int:
    """Serve a model that is a local path; `commands` starts each child."""
    with StopSignals() as stop:
        try:
            with run_directory() as run_dir:
                return Launcher(config, Links(run_dir), stop).run(commands)
        except (AddressTooLong, CannotBind, NoRunDirectory) as error:
            log.error("%s", error)
            return 1


class StopSignals:
    """Context manager that collects SIGINT, SIGTERM and SIGHUP instead of dying of them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup sets SIGHUP to ignored, so that the process outlives the terminal
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.received.append(signum)


class _Ended(Exception):
    """The server ends without a finished drain; carries the exit status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Launcher:
    """Start, supervision and drain of the children of one server."""

    def __init__(self, config: ServerConfig, links: Links, stop: StopSignals) -> None:
        self._config = config
        self._links = links
        self._stop = stop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[ToLauncher] = Mailbox(
            self._context, links.launcher, codec.to_launcher()
        )
        self._children: dict[str, ChildProcess] = {}
        self._last_words: dict[str, str] = {}
        self._url = ""
        self._started = time.monotonic()

    def run(self, commands: Mapping[str, Sequence[str]]) -> int:
        try:
            self._start(commands)
            self._wait_until_ready()
            self._announce()
            self._supervise()
            self._drain()
        except _Ended as end:
            log.error("%s", end)
            return end.status
        finally:
            self._kill_all()
            self._mailbox.close()
            self._context.term()
        return 0

    def _start(self, commands: Mapping[str, Sequence[str]]) -> None:
        for name, slice_ in child_configs(self._config, self._links).items():
            self._children[name] = ChildProcess(name, commands[name], slice_)

    def _wait_until_ready(self) -> None:
        limit = self._config.runtime.start_timeout
        deadline = time.monotonic() + limit
        while waiting := self._in_state(ChildState.STARTING):
            self._turn()
            if self._stop.received:
                signum = self._stop.received[0]
                raise _Ended(128 + signum, f"stopped by {_name(signum)} before it was ready")
            if time.monotonic() > deadline:
                raise _Ended(1, f"not ready within {limit:g} s: {', '.join(waiting)}")

    def _announce(self) -> None:
        # The second half is the line that scripts written for SGLang wait for.
        log_format.say(
            f"tokenloom is serving {self._config.model.served_model_name} at {self._url} - "
            "The server is fired up and ready to roll!"
        )
        log.debug("ready after %.1f s", time.monotonic() - self._started)

    def _supervise(self) -> None:
        while not self._stop.received:
            self._turn()

    def _drain(self) -> None:
        """Ask the front to drain; it passes the drain on, and each child then exits by itself."""
        limit = self._config.runtime.drain_timeout
        log.info("draining, for up to %g s; a second signal ends at once", limit)
        for name in self._in_state(ChildState.READY):
            self._children[name].move(ChildState.DRAINING)
        self._children[FRONT].terminate()
        deadline = time.monotonic() + limit + DRAIN_GRACE_S
        while left := self._in_state(ChildState.DRAINING):
            self._turn()
            if len(self._stop.received) > 1:
                signum = self._stop.received[-1]
                raise _Ended(128 + signum, f"{_name(signum)} cut the drain short")
            if time.monotonic() > deadline:
                raise _Ended(1, f"drain time is over, killing: {', '.join(left)}")
        log.info("drained")

    def _in_state(self, state: ChildState) -> list[str]:
        return [child.name for child in self._children.values() if child.state is state]

    def _turn(self) -> None:
        """Read the children's messages for up to POLL_MS; raise _Ended after an unplanned death."""
        self._hear(POLL_MS)
        dead: dict[str, int] = {}
        for name, child in self._children.items():
            status = child.reap()
            planned = status == 0 and self._stop.received
            if status is not None and not planned:
                dead[name] = status
        if dead:
            self._let_front_end(dead)
            if not dead.keys() & self._last_words.keys():
                self._hear(LAST_WORDS_MS)
            raise _Ended(1, "\n".join(self._obituary(*death) for death in dead.items()))

    def _let_front_end(self, dead: Mapping[str, int]) -> None:
        """Tell a serving front of the deaths; give it FAREWELL_S to end its streams."""
        if FRONT not in self._in_state(ChildState.READY) + self._in_state(ChildState.DRAINING):
            return
        front = self._children[FRONT]
        outbox = Outbox(self._context, self._links.front)
        for name, status in dead.items():
            outbox.send(ChildDied(name, how_it_ended(status)))
        outbox.close()
        deadline = time.monotonic() + FAREWELL_S
        while front.state is not ChildState.EXITED and time.monotonic() < deadline:
            self._hear(FAREWELL_POLL_MS)
            front.reap()

    def _hear(self, timeout_ms: int) -> None:
        for message in self._mailbox.receive(timeout_ms):
            match message:
                case ChildReady(name, detail) if name in self._in_state(ChildState.STARTING):
                    self._children[name].move(ChildState.READY)
                    log.debug("%s is ready", name)
                    if name == FRONT:
                        self._url = detail
                case ChildFailed(name, words) if name in self._children:
                    self._last_words[name] = words
                case _:  # from an unknown child, or sent twice
                    self._mailbox.strays.drop_message(message)

    def _obituary(self, name: str, status: int) -> str:
        story = self._children[name].story
        words = self._last_words.get(name, "")
        told = f"; its last words: {words}" if words else ""
        return f"{name} died while {story[-2].value}: {how_it_ended(status)}{told}"

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()


def child_configs(
    config: ServerConfig, links: Links
) -> dict[str, FrontConfig | SchedulerConfig | DetokenizerConfig]:
    """Return each child's config by name, in the order of their start."""
    log_level = config.runtime.log_level
    return {
        "scheduler": SchedulerConfig(
            model=config.model,
            scheduling=config.scheduling,
            execution=config.execution,
            log_level=log_level,
            links=links,
            lora=config.lora,
        ),
        "detokenizer": DetokenizerConfig(model=config.model, log_level=log_level, links=links),
        FRONT: FrontConfig(
            model=config.model,
            doors=config.doors,
            log_level=log_level,
            links=links,
            lora=config.lora,
            drain_timeout=config.runtime.drain_timeout,
        ),
    }


def _name(signum: int) -> str:
    return signal.Signals(signum).name


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
