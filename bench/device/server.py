"""The whole server with dummy weights under the load of bench.

Makes the model path that the server needs: a config, and a tokenizer of as many made-up words.
"""

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ..engines import EngineFailed, running, tokenloom
from ..http_stream import HttpClient
from ..load import Driver, Run, run_workload
from ..summary import summarise
from ..targets import Dialect, HttpTarget, first_model
from ..workloads import Closed, Shape, Source, Stream, independent
from .lab import Lab
from .results import CheckFailed, Report

START_SHARE = 0.8  # of the section's time
LEAST_SECONDS = 5.0  # of a load


def make_model_directory(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and tokenizer.json, which `--load-format dummy` reads."""
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def server(lab: Lab, report: Report) -> None:
    lab.release()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_directory(folder, lab.sizes.large)
        flags = ("--model", name, "--load-format", "dummy", *lab.sizes.server_flags)
        engine = replace(
            tokenloom(sys.executable, "tokenloom", flags),
            ready_seconds=max(report.left * START_SHARE, 1.0),
        )
        try:
            with running(engine, folder) as server:
                report.add("ready after", server.start_seconds, "s")
                for load in lab.sizes.server_loads:
                    _under(load, server.base_url, lab, report)
                server.check()
        except EngineFailed as error:
            raise CheckFailed(f"the server {error}") from error


def _under(load: tuple[int, int, int], url: str, lab: Lab, report: Report) -> None:
    in_flight, prompt, answer = load
    name = f"{in_flight} in flight, {prompt} -> {answer}"
    if not report.has_time(name, LEAST_SECONDS):
        return
    run = asyncio.run(_run(url, load, report, lab))
    total = summarise(run.records)
    # A request that does not end before the section does counts as one that failed.
    if total.errors:
        raise CheckFailed(f"{name}: {total.errors}, {run.messages}")
    report.add(f"{name}: output", total.output_tok_s, "tok/s")
    report.add(f"{name}: first token p50", total.ttft_ms.p50, "ms")
    report.add(f"{name}: between tokens p50", total.inter_token_ms.p50, "ms")
    report.add(f"{name}: between tokens p99", total.inter_token_ms.p99, "ms")


async def _run(url: str, load: tuple[int, int, int], report: Report, lab: Lab) -> Run:
    """Send four requests for each one in flight."""
    in_flight, prompt, answer = load
    client = HttpClient(url)
    target = HttpTarget(client, await first_model(client), Dialect())
    try:
        source = Source(prompt, range(1, lab.sizes.large["vocab_size"]))
        sessions = independent(source, 4 * in_flight, Shape(prompt, answer))
        stream = Stream("requests", sessions, Closed(in_flight))
        return await run_workload((stream,), Driver(target, max(report.left, 1.0)))
    finally:
        await target.aclose()
