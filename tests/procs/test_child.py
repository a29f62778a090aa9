"""run_child in a process of its own, with the test in the launcher's place."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tokenloom.wire import codec
from tokenloom.wire.channel import Mailbox
from tokenloom.wire.child import LAST_WORDS_LIMIT, ORPHANED
from tokenloom.wire.config import DetokenizerConfig, Links, ModelConfig
from tokenloom.wire.messages import ChildFailed, ChildReady, ToLauncher

DEADLINE_S = 20.0
PROGRAM = """
import logging, os, signal, sys, threading
from tokenloom.wire.child import ChildLife, run_child
from tokenloom.wire.config import DetokenizerConfig
def main(config, life):
{body}
run_child({name!r}, DetokenizerConfig, main)
"""


class Parent:
    """A launcher's mailbox, and children started from a few lines of code."""

    def __init__(self, run_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        links = Links(str(run_dir))
        self.mailbox: Mailbox[ToLauncher] = Mailbox(
            self._context, links.launcher, codec.to_launcher()
        )
        self.config = msgspec.json.encode(
            DetokenizerConfig(model=ModelConfig(model="/m"), log_level="info", links=links)
        )
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, body: str, name: str = "detokenizer") -> subprocess.Popen[bytes]:
        """A child whose main has `body`; its standard input is still open and empty."""
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=indented, name=name)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._started.append(child)
        return child

    def run(self, body: str) -> tuple[int, str]:
        """Feed the config, keep the death pipe open, wait: exit status and standard error."""
        child = self.start(body)
        feed(child, self.config + b"\n")
        assert child.stderr is not None
        logged = child.stderr.read().decode()
        return child.wait(DEADLINE_S), logged

    def hear(self) -> ToLauncher:
        (message,) = self.mailbox.receive(int(DEADLINE_S * 1000))
        return message

    def close(self) -> None:
        for child in self._started:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stderr):
                assert pipe is not None
                pipe.close()
        self.mailbox.close()
        self._context.term()


def feed(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(line)


def hang_up(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


@pytest.fixture
def parent(short_tmp: Path) -> Iterator[Parent]:
    one = Parent(short_tmp)
    yield one
    one.close()


def test_main_gets_its_config_and_its_status_is_the_exit_status(parent: Parent) -> None:
    assert parent.run("life.ready(config.model.model)\nreturn 5")[0] == 5
    assert parent.hear() == ChildReady("detokenizer", "/m")


def test_log_lines_have_the_format_that_tools_parse(parent: Parent) -> None:
    status, logged = parent.run(
        "logging.getLogger('x').info('Decode batch. 50%%')\n"
        "logging.getLogger('x').warning('careful')\n"
        "logging.getLogger('x').debug('unseen')\nreturn 0"
    )
    assert status == 0
    first, second = logged.splitlines()
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d detokenizer\] "
    assert re.fullmatch(stamp + "Decode batch. 50%%", first)
    assert second.endswith("] warning: careful")


def test_unexpected_error_is_reported_with_its_place(parent: Parent) -> None:
    status, logged = parent.run("def inner():\n    raise KeyError('gone')\ninner()")
    assert status == 1
    assert "Traceback" in logged
    message = parent.hear()
    assert isinstance(message, ChildFailed)
    assert message.message.startswith("KeyError: 'gone'\n")
    assert "in inner" in message.message


def test_refusal_of_our_own_is_reported_without_a_traceback(parent: Parent) -> None:
    status, logged = parent.run(
        "from tokenloom.model_files.errors import ModelError\nraise ModelError('no such model')"
    )
    assert status == 1
    assert "Traceback" not in logged
    assert parent.hear() == ChildFailed("detokenizer", "no such model")


def test_refusal_inside_a_task_group_is_the_same_refusal(parent: Parent) -> None:
    status, logged = parent.run(
        "import asyncio\n"
        "from tokenloom.model_files.errors import ModelError\n"
        "async def refuse():\n"
        "    raise ModelError('no such model')\n"
        "async def run():\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(refuse())\n"
        "asyncio.run(run())"
    )
    assert status == 1
    assert "Traceback" not in logged
    assert parent.hear() == ChildFailed("detokenizer", "no such model")


def test_threads_left_behind_do_not_hold_up_the_end(parent: Parent) -> None:
    status, _ = parent.run("threading.Thread(target=threading.Event().wait).start()\nreturn 4")
    assert status == 4


def test_value_error_of_others_is_a_surprise(parent: Parent) -> None:
    status, logged = parent.run("int('x')")
    assert status == 1
    assert "Traceback" in logged


def test_last_words_are_bounded(parent: Parent) -> None:
    parent.run("raise RuntimeError('x' * 100_000)")
    message = parent.hear()
    assert isinstance(message, ChildFailed)
    assert len(message.message) <= LAST_WORDS_LIMIT


def test_exit_status_of_sys_exit_is_kept(parent: Parent) -> None:
    assert parent.run("sys.exit(9)")[0] == 9


def test_thread_left_behind_does_not_hold_up_the_end_of_a_crash(parent: Parent) -> None:
    status, _ = parent.run("threading.Thread(target=threading.Event().wait).start()\nraise OSError")
    assert status == 1


def test_end_of_standard_input_ends_a_waiting_child(parent: Parent) -> None:
    child = parent.start("life.ready()\nthreading.Event().wait()")
    feed(child, parent.config + b"\n")
    assert isinstance(parent.hear(), ChildReady)
    hang_up(child)
    assert child.wait(DEADLINE_S) == ORPHANED


def test_launcher_gone_before_main_is_noticed_before_main(parent: Parent) -> None:
    child = parent.start("life.ready()\nsum(range(1 << 62))")
    feed(child, parent.config + b"\n")
    hang_up(child)
    assert child.wait(DEADLINE_S) == ORPHANED
    assert parent.mailbox.receive(0) == []


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b"not json\n"])
def test_start_without_a_config_says_how_to_start(parent: Parent, line: bytes) -> None:
    child = parent.start("return 0")
    feed(child, line)
    hang_up(child)
    assert child.wait(DEADLINE_S) == 2
    assert child.stderr is not None
    assert b"tokenloom serve" in child.stderr.read()


@pytest.mark.parametrize(
    ("name", "signum", "ends"),
    [
        ("scheduler", signal.SIGINT, False),
        ("scheduler", signal.SIGTERM, False),
        ("tokenizer", signal.SIGINT, False),
        ("tokenizer", signal.SIGTERM, True),
    ],
)
def test_only_the_front_is_ended_by_sigterm(
    parent: Parent, name: str, signum: signal.Signals, ends: bool
) -> None:
    child = parent.start(
        f"os.kill(os.getpid(), {int(signum)})\nlife.ready()\nthreading.Event().wait()", name
    )
    feed(child, parent.config + b"\n")
    if ends:
        assert child.wait(DEADLINE_S) == -signum
    else:
        assert parent.hear() == ChildReady(name)


def test_process_has_a_name_that_ps_shows(parent: Parent) -> None:
    child = parent.start("life.ready()\nthreading.Event().wait()")
    feed(child, parent.config + b"\n")
    parent.hear()
    command = Path(f"/proc/{child.pid}/cmdline")
    if not command.exists():
        pytest.skip(f"{os.uname().sysname} has no /proc")
    assert command.read_bytes().startswith(b"tokenloom::detokenizer")
