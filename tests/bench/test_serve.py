"""`tokenloom bench` from its flags to its output, against a fake server and a socket door."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_openai import CACHED, FakeOpenAI

from tokenloom import cli
from tokenloom.bench.serve import main
from tokenloom.bench.serve_flags import parse_flags
from tokenloom.bench.workloads import Closed, Open, Source, Workload


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


def bench(server: FakeOpenAI, *flags: str) -> int:
    return cli.main(["bench", *flags, "--base-url", server.base_url])


def test_closed_loop_prints_a_table_and_writes_json(
    server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    flags = ["--requests", "6", "--concurrency", "2", "--prompt-tokens", "5"]
    assert bench(server, "independent", *flags, "--answer-tokens", "3", "--json", str(file)) == 0
    shown = capsys.readouterr()
    assert "6 of 6 requests answered" in shown.out
    assert f"30 prompt tokens, {6 * CACHED} of them cached; 18 output tokens" in shown.out
    for line in ("time to first token, ms", "inter-token, ms", "the harness:"):
        assert line in shown.out
    assert shown.err == "", "no bar without a terminal"
    said = json.loads(file.read_bytes())
    assert said["model"] == "fine"
    assert said["flags"]["concurrency"] == 2
    assert said["result"]["total"]["output_tokens"] == 18
    assert said["result"]["total"]["ttft_ms"]["count"] == 6
    assert said["result"]["total"]["late_ms"]["p50"] is None, "NaN is null in JSON"
    assert said["result"]["harness"]["lag_ms"]["count"] > 0
    assert server.most <= 2
    assert len(server.asked) == 2 + 6, "two to warm up"


def test_open_loop_tells_how_late_it_was(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "independent", "--requests", "5", "--rate", "500") == 0
    assert "sent after due time, ms" in capsys.readouterr().out


def test_errors_make_the_status_and_are_shown(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--requests", "3", "--warmup", "0", "--model", "refuses"]
    assert bench(server, "shared-prefix", *flags) == 1
    shown = capsys.readouterr().out
    assert "0 of 3 requests answered" in shown
    assert "3 x HTTP 503" in shown
    assert "too busy" in shown


def test_long_prompts_are_told_apart_from_the_rest(
    server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    flags = ["--requests", "2", "--rate", "50", "--concurrency", "2", "--long-tokens", "40"]
    assert bench(server, "long-prompts", *flags, "--json", str(file)) == 0
    assert {"decode", "long"} <= set(capsys.readouterr().out.split())
    labels = json.loads(file.read_bytes())["result"]["by_label"]
    assert labels["long"]["ok"] == 2
    assert labels["long"]["prompt_tokens"] == 80


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chats", "--base-url", "http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no server at http://127.0.0.1:9" in line


def test_api_key_is_sent_and_not_written(server: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--requests", "1", "--api-key", "s3cret", "--json", str(file)]
    assert bench(server, "independent", *flags) == 0
    assert {headers["authorization"] for headers in server.headers} == {"Bearer s3cret"}
    assert "s3cret" not in file.read_text()


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "WORKLOAD"),
        (["independent", "--turns", "3"], "--turns"),
        (["independent", "--rate", "3", "--concurrency", "2"], "--concurrency"),
        (["independent", "--requests", "0"], "--requests"),
        (["independent", "--length-spread", "1"], "--length-spread"),
        (["chats", "--text-prompts"], "--text-prompts"),
        (["chats", "--socket", "30000", "--api-key", "x"], "--api-key"),
        (["chats", "--json", "/nowhere/at/all.json"], "--json"),
    ],
)
def test_wrong_flags_are_named(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err.splitlines()[-1]


def workload(*argv: str) -> Workload:
    flags = parse_flags(list(argv))
    built: Workload = flags.build(flags, Source(flags.seed))
    return built


def test_flags_make_workloads() -> None:
    (only,) = workload("independent", "--requests", "7", "--concurrency", "3")
    assert (len(only.sessions), only.pace) == (7, Closed(3))
    (only,) = workload("shared-prefix", "--requests", "4", "--groups", "2", "--rate", "2")
    assert isinstance(only.pace, Open)
    assert len(only.sessions[0][0].tokens) == 1024 + 32
    (only,) = workload("chats", "--requests", "2", "--turns", "5")
    assert [len(session) for session in only.sessions] == [5, 5]
    steady, arriving = workload("long-prompts", "--requests", "3", "--long-tokens", "99")
    assert (steady.pace, steady.background) == (Closed(8), True)
    assert [len(session[0].tokens) for session in arriving.sessions] == [99] * 3
