"""Start-up and end of a child process: config from standard input, watch on its parent, reports.

Each `python -m tokenloom.x_proc` calls `run_child` first. Its standard input carries one line of
config and then stays open until the parent dies. `main` does the heavy imports, so that the watch
runs before them. Nothing specific to one child enters here.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec
import setproctitle
import zmq

from . import log as log_format
from .channel import Outbox
from .config import DetokenizerConfig, FrontConfig, SchedulerConfig
from .messages import ChildFailed, ChildReady
from .slices import ask_for_short_slices

C = TypeVar("C", bound=FrontConfig | SchedulerConfig | DetokenizerConfig)

FRONT = "tokenizer"  # the only child that handles SIGTERM: a drain starts at the doors
ORPHANED = 3  # exit status of a child whose launcher went away
LAST_WORDS_LIMIT = 2000  # characters
_TRACEBACK_FRAMES = 3
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class ChildLife:
    """Reports of a child to the launcher: ready, or failed."""

    def __init__(self, name: str, launcher: str) -> None:
        self._name = name
        self._launcher = launcher

    def ready(self, detail: str = "") -> None:
        """Report once that this process serves; the front's `detail` is its URL.

        Freezes all objects that exist: a garbage collection over them would stall a step by tens of
        milliseconds.
        """
        gc.collect()
        gc.freeze()
        self._tell(ChildReady(self._name, detail))

    def failed(self, message: str) -> None:
        self._tell(ChildFailed(self._name, message[-LAST_WORDS_LIMIT:]))

    def _tell(self, message: ChildReady | ChildFailed) -> None:
        # One context per message: term() returns when the message has been sent.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        outbox = Outbox(context, self._launcher)
        outbox.send(message)
        outbox.close()
        context.term()


def run_child(name: str, config_type: type[C], main: Callable[[C, ChildLife], int]) -> NoReturn:
    """Run `main(config, life)` as the child `name` and exit with the status that it returns.

    SIGINT is ignored (Ctrl-C reaches the whole terminal group; the launcher decides), and SIGTERM
    too except in the front, which installs its own handler. An exception that escapes `main` is
    reported to the launcher and ends the process with status 1.
    """
    _set_signals(name)
    ask_for_short_slices()
    setproctitle.setproctitle(f"tokenloom::{name}")
    faulthandler.enable()
    config = _read_config(name, config_type)
    if select.select([0], [], [], 0)[0] and not os.read(0, 1):
        os._exit(ORPHANED)  # the launcher died before the kernel was told to watch it
    threading.Thread(target=_watch_launcher, name="launcher-watch", daemon=True).start()
    log_format.configure(name, config.log_level)
    life = ChildLife(name, config.links.launcher)
    try:
        status = main(config, life)
    except Exception as error:
        _report(_innermost(error), life)
        status = 1
    # Skip interpreter shutdown: leftover threads, sockets or torch's teardown could block it.
    log_format.let_go()
    os._exit(status)


def _set_signals(name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if name != FRONT:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Besides the pipe: this also ends a process whose interpreter is stuck in a long C call.
        # The kernel watches the thread that started us, the parent's main thread.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_config(name: str, config_type: type[C]) -> C:
    line = sys.stdin.buffer.readline()
    try:
        return msgspec.json.decode(line, type=config_type)
    except msgspec.DecodeError as error:
        print(
            f"tokenloom {name}: no usable config on standard input ({error}); "
            "start the server with `tokenloom serve`",
            file=sys.stderr,
        )
        sys.exit(2)


def _watch_launcher() -> None:
    """End this process as soon as standard input closes, whatever else it is doing."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


def _innermost(error: Exception) -> Exception:
    """Unwrap exception groups of one: a task group wraps even a single error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _report(error: Exception, life: ChildLife) -> None:
    """Report an error to the launcher: our own ValueErrors and OSErrors as their message, others
    with a traceback."""
    ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    if ours and isinstance(error, ValueError | OSError):
        log.error("%s", error)
        life.failed(str(error))
        return
    log.critical("unexpected error, this process ends", exc_info=error)
    headline = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_TRACEBACK_FRAMES:]
    tail = "".join(traceback.format_list(frames)).rstrip()
    life.failed(f"{headline}\n{tail}" if tail else headline)
