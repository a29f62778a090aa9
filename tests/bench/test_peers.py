"""The comparison from its flags to its tables, with a program of words in the peers' places."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from support import fake_openai

from tokenloom.bench import peer_cases, peers
from tokenloom.bench.vocabulary import load_vocabulary
from tokenloom.model_files.resolve import resolve_model


def program(folder: Path, name: str, python: str) -> str:
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {python} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(peers, "IDLE_LOOK_SECONDS", 0.01)
    fake = program(tmp_path, "fake", shlex.quote(fake_openai.__file__))
    work = ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]
    return [*work, "--llama-server", fake, "--gguf", "one=a.gguf", "--gguf", "two=b.gguf"]


@pytest.mark.slow
def test_engines_are_measured_in_turn(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_cases, "ARRIVAL_SECONDS", 0.02)
    more = ["--engines", "llama", "--runs", "2", "--only", "a,d,e,prefill"]
    assert peers.main([*flags, *more]) == 0
    shown = capsys.readouterr()
    assert "llama.cpp one" in shown.out
    assert "8 chats of 4 turns" in shown.out
    assert "nothing to compare" in shown.out, "our own server was left out"
    assert "'The capital of France is' -> ' w0 w1" in shown.err
    said = json.loads((tmp_path / "out.json").read_bytes())
    assert [engine["name"] for engine in said["engines"]] == ["llama.cpp one", "llama.cpp two"]
    assert len(said["measurements"]) == 2 * 2 * 4
    assert {m["engine"] for m in said["measurements"]} == {"llama.cpp one", "llama.cpp two"}
    for case in ("a", "d", "e", "prefill"):
        assert said["medians"][case]["llama.cpp two"]
    assert said["medians"]["d"]["llama.cpp one"]["cached"] > 0


def test_an_engine_that_fails_does_not_stop_the_others(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = program(tmp_path, "vllm", "-c 'raise SystemExit(7)'")
    more = ["--vllm", broken, "--model", resolve_model(None, None), "--engines", "llama,vLLM"]
    (tmp_path / "work" / f"{Path(resolve_model(None, None)).stem}-hf-bf16").mkdir(parents=True)
    assert peers.main([*flags, *more, "--runs", "0"]) == 1
    assert "status 7" in capsys.readouterr().err
    said = json.loads((tmp_path / "out.json").read_bytes())
    failures = {engine["name"]: engine["failure"] for engine in said["engines"]}
    assert failures["llama.cpp one"] == ""
    assert "status 7" in failures["vLLM bf16"]


def test_what_is_not_installed_is_said_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "IDLE_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.main(["--work", str(tmp_path), "--engines", "nobody"]) == 0
    shown = capsys.readouterr().err
    for name, how in peers.HOW_TO_GET.items():
        assert name in shown
        assert how in shown


@pytest.mark.parametrize("bad", [["--only", "a,z"], ["--ours", "int8"], ["--engine", "x"]])
def test_wrong_flags(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.main(bad)
    assert stopped.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_words_are_the_same_as_ids_and_as_text() -> None:
    vocabulary = load_vocabulary(resolve_model(None, None))
    assert len(vocabulary.words) > 5000
    ids = list(vocabulary.words[:: len(vocabulary.words) // 500])
    assert vocabulary.encode(vocabulary.decode(ids)) == ids
