"""The harness against a real server: both doors count the same, and the cache shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import Server, running_server

from tokenloom.bench.serve import main
from tokenloom.model_files.resolve import resolve_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--kv-tokens", "4000") as running:
        yield running


def total(file: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(file.read_bytes())["result"]["total"]
    return summary


@pytest.mark.parametrize("door", ["HTTP", "socket"])
def test_counts_and_cached_prefixes(server: Server, tmp_path: Path, door: str) -> None:
    where = ["--base-url", server.url] if door == "HTTP" else ["--socket", server.door]
    file = tmp_path / "out.json"
    seed = str(len(door))  # a prefix that the other door did not leave in the cache
    flags = ["--requests", "4", "--concurrency", "1", "--prefix-tokens", "64", "--seed", seed]
    flags += ["--prompt-tokens", "8", "--answer-tokens", "5", "--warmup", "0"]
    assert main(["shared-prefix", *where, *flags, "--json", str(file)]) == 0
    summary = total(file)
    assert (summary["ok"], summary["short_answers"]) == (4, 0)
    assert summary["prompt_tokens"] == 4 * (64 + 8)
    assert summary["output_tokens"] == 4 * 5
    assert summary["cached_tokens"] == 3 * 64
    assert summary["ttft_ms"]["count"] == 4


def test_chats_say_again_what_the_server_said(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--requests", "1", "--turns", "3", "--prompt-tokens", "20", "--answer-tokens", "20"]
    flags += ["--socket", server.door, "--warmup", "0", "--seed", "7"]
    assert (
        main(["chats", *flags, "--tokenizer", resolve_model(None, None), "--json", str(file)]) == 0
    )
    summary = total(file)
    assert summary["prompt_tokens"] == 20 + 60 + 100
    # Whole pages of 16 tokens of all that was computed before: all but the last answer token.
    assert summary["cached_tokens"] == 39 // 16 * 16 + 79 // 16 * 16
