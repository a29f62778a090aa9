"""What the three children share: config from standard input, the watch on the launcher, last words.

Each `python -m tokenloom.x_proc` calls `run_child` first thing. Its standard input is the death
pipe: one line of config, then nothing until it closes, which means that the launcher is gone. Heavy
imports belong into `main`, so that the watch is on before them. No work of any child enters here.
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

FRONT = "tokenizer"  # the one child that a SIGTERM may end: a drain starts at the doors
ORPHANED = 3  # exit status of a child whose launcher went away
LAST_WORDS_LIMIT = 2000  # characters
_TRACEBACK_FRAMES = 3
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class ChildLife:
    """What a child may say about its own life, to the launcher."""

    def __init__(self, name: str, launcher: str) -> None:
        self._name = name
        self._launcher = launcher

    def ready(self, detail: str = "") -> None:
        """Say once that this process serves; the front's `detail` is its URL.

        What has been loaded by now stays: looking through it again for garbage would hold up a
        step by tens of milliseconds now and then.
        """
        gc.collect()
        gc.freeze()
        self._tell(ChildReady(self._name, detail))

    def failed(self, message: str) -> None:
        self._tell(ChildFailed(self._name, message[-LAST_WORDS_LIMIT:]))

    def _tell(self, message: ChildReady | ChildFailed) -> None:
        # A context for each of the few messages: term() returns when the words are out.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        outbox = Outbox(context, self._launcher)
        outbox.send(message)
        outbox.close()
        context.term()


def run_child(name: str, config_type: type[C], main: Callable[[C, ChildLife], int]) -> NoReturn:
    """Run `main(config, life)` as the child `name` and exit with the status that it returns.

    SIGINT is ignored (a Ctrl-C reaches the whole terminal group; the launcher decides), SIGTERM too
    except in the front, which replaces the default handler by its own. An exception that escapes
    `main` becomes the last words in the launcher's mailbox and exit status 1.
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
    # What main left behind, be it threads, sockets or torch's teardown, must not hold up the end.
    log_format.let_go()
    os._exit(status)


def _set_signals(name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if name != FRONT:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Second line behind the death pipe: it also ends a process whose interpreter is stuck in a
        # long C call. The kernel watches the thread that started us, the launcher's main thread.
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
    """Wait for the end of standard input, then end this process whatever else it is doing."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)


def _innermost(error: Exception) -> Exception:
    """The one error of a task group, which wraps even a single one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _report(error: Exception, life: ChildLife) -> None:
    """Refusals of our own (ValueErrors such as ModelError) need no traceback, surprises do."""
    ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    if ours and isinstance(error, ValueError):
        log.error("%s", error)
        life.failed(str(error))
        return
    log.critical("unexpected error, this process ends", exc_info=error)
    headline = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_TRACEBACK_FRAMES:]
    tail = "".join(traceback.format_list(frames)).rstrip()
    life.failed(f"{headline}\n{tail}" if tail else headline)
