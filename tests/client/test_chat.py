"""`tokenloom chat` as a process of its own, through pipes and in a terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from door_fakes import FakeStream, Served, served_in_thread, wait_until

from tokenloom.client.chat import main
from tokenloom.wire.messages import Finish
from tokenloom.wire.sampling import SamplingParams

STOP = Finish("stop", matched=7)
# As from a terminal: a run of the tests in the background hands down an ignored SIGINT.
CHAT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tokenloom.client.chat import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Served]:
    with served_in_thread(tmp_path) as setup:
        setup.front.on_submit = echo
        yield setup


def echo(stream: FakeStream) -> None:
    """Answers with the whole conversation as the front saw it."""
    stream.push("<" + "".join(map(chr, stream.input_ids)))
    stream.push(">", (1,), STOP)


def command(setup: Served, *flags: str) -> list[str]:
    return [sys.executable, "-c", CHAT, "--address", setup.address, *flags]


def say(setup: Served, typed: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(setup, *flags), input=typed, capture_output=True, text=True, timeout=20
    )


def test_a_conversation_through_a_pipe(setup: Served) -> None:
    flags = ("--system", "be kind", "--temperature", "0", "--max-new-tokens", "9", "--seed", "5")
    done = say(setup, "one\n\ntwo\n/reset\nthree\n/quit\nnever\n", *flags)
    first = "<system:be kind|user:one>"
    assert done.stdout.splitlines() == [
        first,
        f"<system:be kind|user:one|assistant:{first}|user:two>",
        "<system:be kind|user:three>",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    sampling = setup.front.streams[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.seed) == (0, 9, 5)


def test_sampling_is_sober_unless_the_model_or_the_user_says_otherwise(setup: Served) -> None:
    say(setup, "one\n")
    say(setup, "one\n", "--temperature", "0.9")
    setup.front.recommended = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    say(setup, "one\n")
    say(setup, "one\n", "--top-k", "5", "--top-p", "0.5", "--repetition-penalty", "1.2")
    used = [stream.sampling for stream in setup.front.streams]
    assert used == [
        SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1),
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1),
        SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1),
        SamplingParams(temperature=0.6, top_p=0.5, top_k=5, repetition_penalty=1.2),
    ]


def test_an_adapter_answers(setup: Served) -> None:
    setup.front.adapters.registry.known["upper"] = "/upper"
    assert say(setup, "one\n", "--adapter", "upper").stdout == "<user:one>\n"
    assert setup.front.streams[0].lora_id == 1
    refused = say(setup, "one\n", "--adapter", "other")
    assert refused.returncode == 1
    assert "other" in refused.stderr


def test_a_refused_turn_is_told_and_forgotten(setup: Served) -> None:
    done = say(setup, "one\n/nonsense\n", "--top-p", "7")
    assert done.returncode == 1
    assert "top_p must be above 0" in done.stderr
    assert "/nonsense: /reset forgets" in done.stderr
    assert not setup.front.streams


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(setup: Served) -> None:
    setup.front.on_submit = lambda stream: stream.push("part", (1,))
    with subprocess.Popen(
        command(setup), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("one\n")
        chat.stdin.flush()
        assert chat.stdout.read(4) == "part"
        chat.send_signal(signal.SIGINT)
        wait_until(lambda: setup.front.streams[0].closed)
        assert chat.stdout.readline() == " [stopped]\n"
        setup.front.on_submit = echo
        chat.stdin.write("two\n")
        chat.stdin.close()
        assert chat.stdout.readline() == "<user:one|assistant:part|user:two>\n"
        assert chat.wait() == 0


def test_in_a_terminal_it_prompts_and_ctrl_d_leaves(setup: Served) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(setup), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as chat:
        os.close(theirs)
        seen = read_to(ours, b"> ")
        assert b"fake-model at ipc://" in seen
        assert b"/quit or Ctrl-D leaves" in seen
        os.write(ours, b"hello\n")
        assert b"<user:hello>" in read_to(ours, b"> ")
        chat.send_signal(signal.SIGINT)  # may come before `input` waits; then Enter wakes it
        os.write(ours, b"\n")
        read_to(ours, b"> ")
        os.write(ours, b"\x04")
        assert chat.wait(timeout=20) == 0
    os.close(ours)


def read_to(terminal: int, end: bytes) -> bytes:
    seen = b""
    while not seen.endswith(end):
        assert select.select([terminal], [], [], 20)[0], f"after {seen!r} nothing came"
        seen += os.read(terminal, 1000)
    return seen


def test_no_server_is_a_message_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.client.chat.CONNECT_SECONDS", 0.05)
    assert main(["--address", f"ipc://{tmp_path}/none.sock"]) == 1
    assert "no server answers" in (error := capsys.readouterr().err)
    assert "tokenloom serve" in error
    assert main(["--address", "http://localhost"]) == 1
    assert "neither ipc:///absolute/path nor tcp://" in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--port", "--address", "--system", "--temperature", "--max-new-tokens"):
        assert flag in text
