"""Credentials in addresses are masked wherever a process writes."""

import logging

import pytest

from tokenloom.wire import log as log_format
from tokenloom.wire.secrets import masked

TEXTS = [
    ("https://me:sk-1@host/model does not exist", "https://***@host/model does not exist"),
    ("tcp://sk-1@host:5557: in use", "tcp://***@host:5557: in use"),
    ("a://u:p@x and b://u:p@@y/z", "a://***@x and b://***@y/z"),
    ("https://host/a@b", "https://host/a@b"),
    ("me@host", "me@host"),
]


@pytest.mark.parametrize(("text", "shown"), TEXTS)
def test_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_logs_and_lines_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log_format.configure("p", "info")
        try:
            raise ValueError("https://u:sk-1@h/x")
        except ValueError:
            logging.getLogger("x").exception("model %s", "https://u:sk-1@h/x")
        log_format.say("served from https://u:sk-1@h/x")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    written = capsys.readouterr()
    assert "sk-1" not in written.out + written.err
    assert "https://***@h/x" in written.out
    assert written.err.count("https://***@h/x") >= 2
