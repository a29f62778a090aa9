"""Some seconds of churn at a real server, on fewer slots and places in memory than adapters."""

from pathlib import Path

import pytest
from support.server import running_server

from tokenloom.bench.lora_churn import Heard, main, unlike

pytestmark = pytest.mark.slow


def test_every_answer_is_that_of_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--max-loras-per-batch", "2", "--max-loaded-loras", "4"]
    with running_server("--dtype", "int4", "--lora-root", str(tmp_path), *few) as server:
        where = ["--port", str(server.port), "--socket", server.door, "--root", str(tmp_path)]
        status = main([*where, "--adapters", "6", "--seconds", "3", "--clients", "4"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "reloads" in said
    assert "nothing is left" in said


def test_a_wrong_answer_is_noticed() -> None:
    right, wrong = Heard([1, 2], {(0, 0), (0, 1)}), Heard([9], {(0, 0)})
    alone = {(0, 0): [3, 3, 3], (0, 1): [1, 2, 3]}
    assert unlike([right, wrong], alone) == [wrong]
