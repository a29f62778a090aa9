"""Logs and lines on streams that are closed, full, or cannot spell what is written."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, os
from tokenloom.wire import log
log.configure("test", "info")
logging.getLogger("x").info("one 雨")
log.say("two 雨")
opened = os.open("/dev/null", os.O_RDONLY)
assert opened > 2, opened
log.let_go()
"""


def run(redirect: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "redirect", [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]
)
def test_streams_that_take_nothing_end_no_process(redirect: str) -> None:
    ended = run(redirect)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    if redirect == ">/dev/full":
        assert "warning: standard output takes no line (No space left on device): two" in (
            ended.stderr
        )


def test_what_a_stream_cannot_encode_is_escaped() -> None:
    ended = run("", PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.stderr
    assert "two \\u96e8" in ended.stdout
    assert "one \\u96e8" in ended.stderr
