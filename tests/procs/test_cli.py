"""The `tokenloom` command as a shell sees it."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.source_tree import ROOT

from tokenloom import cli
from tokenloom.launch import COMMANDS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenloom {version('tokenloom')}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_the_parts(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert "tokenloom serve" in shown
    assert "tokenloom chat" in shown
    assert "tokenloom bench" in shown
    assert "To begin" in shown


@pytest.mark.parametrize("argv", [["server"], ["--port", "3"]])
def test_unknown_part_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert repr(argv[0]) in capsys.readouterr().err


def test_missing_model_is_one_clear_line_and_status_1(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tokenloom", "serve", "--model", str(tmp_path / "none.gguf")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "none.gguf does not exist" in line


def test_launch_script_runs_from_a_checkout(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "--page-size", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "--page-size" in ended.stderr


def test_the_launcher_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "tokenizers", "transformers", "uvicorn", "huggingface_hub", "numpy")
    code = f"import sys, tokenloom.launch\nprint([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert loaded == "[]\n"


def test_the_directory_it_runs_in_cannot_stand_in_for_a_library(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from here')")
    *interpreter, _ = COMMANDS["scheduler"]
    ended = subprocess.run(
        [*interpreter, "tokenloom.launch", "--page-size", "0"], cwd=tmp_path, capture_output=True
    )
    assert ended.returncode == 2
