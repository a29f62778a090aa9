"""A child's state machine and how its end is put into words."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from tokenloom.child_process import MOVES, ChildProcess, ChildState, IllegalMove, how_it_ended
from tokenloom.wire.config import ModelConfig


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL (often: out of memory)"),
        (-64, "killed by SIGRTMAX"),
        (-250, "killed by signal 250"),
    ],
)
def test_endings_in_words(status: int, words: str) -> None:
    assert how_it_ended(status) == words


def start(code: str) -> ChildProcess:
    return ChildProcess("toy", (sys.executable, "-c", code), ModelConfig(model="/m"))


def test_every_move_is_in_the_table_or_refused_with_the_story() -> None:
    for before, after in itertools.product(ChildState, ChildState):
        child = start("input()")
        child.story = [before]
        if after in MOVES[before]:
            child.move(after)
            assert child.state is after
        else:
            with pytest.raises(IllegalMove, match=f"toy: {before.name} cannot become"):
                child.move(after)
        child.kill()
        child.close()


def test_config_arrives_and_the_end_is_told_once() -> None:
    child = start("import sys; sys.exit('/m' in input())")
    child.close()
    assert child.reap() == 1
    assert child.state is ChildState.EXITED
    assert child.reap() is None


def test_children_get_no_secrets_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("KEPT", "yes")
    child = start("import os, sys; sys.exit('HF_TOKEN' in os.environ or 'KEPT' not in os.environ)")
    child.close()
    assert child.reap() == 0


def test_kill_takes_what_the_child_started_along(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    says = f"out = open({str(fifo)!r}, 'w'); print('here', file=out, flush=True)"
    grandchild = f"import sys; {says}; sys.stdin.read()"  # to its end, and not just the config
    child = start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])")
    with fifo.open() as opened:
        assert opened.readline() == "here\n"
        child.kill()
        assert opened.read() == ""  # comes when the grandchild is gone
    child.kill()
    child.close()
    assert child.reap() == -signal.SIGKILL
