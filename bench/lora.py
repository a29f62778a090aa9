"""Cost of adapters: `python -m tokenloom.bench.lora`, on the embedded model.

Owns the cases, servers, order of events, and ratios. All servers run side by side and every run
cycles through all cases, so that slow phases of the machine hit all alike. Adapters are random;
answers are not checked.
"""

import argparse
import asyncio
import contextlib
import math
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvloop

from ..client import AsyncClient, ClientError
from ..model_files.resolve import EMBEDDED_NAME
from .comparison import QUIET
from .engines import Engine, EngineFailed, Running, running, tokenloom
from .load import Driver, Run, run_workload
from .machine import CpuMeter, describe
from .random_adapters import MODULES, write_adapter
from .report import as_json, number, table
from .serve import Progress
from .summary import Summary, summarise
from .targets import SocketTarget
from .workloads import Closed, Shape, Source, Stream, Workload, independent

T = TypeVar("T")
IN_FLIGHT = 32
FEW_SLOTS = 8
REQUEST_SECONDS = 240.0
LOADS = 8  # loads per median
WARM_ANSWER = 2  # tokens
OFF, MANY, FEW = "off", "32 slots", "8 slots"  # the servers


@dataclass(frozen=True)
class Case:
    """Closed loop of IN_FLIGHT requests over `adapters` adapters in turn; 0: the base model."""

    name: str
    server: str
    adapters: int


BASE = Case("LoRA off", OFF, 0)
FITTING = Case("8 adapters, 8 slots", FEW, FEW_SLOTS)
THRASH = Case("16 adapters, 8 slots", FEW, 2 * FEW_SLOTS)
CASES = (
    BASE,
    Case("LoRA on, unused", MANY, 0),
    Case("1 adapter", MANY, 1),
    Case("8 adapters", MANY, 8),
    Case("32 adapters", MANY, IN_FLIGHT),
    FITTING,
    THRASH,
)


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark; lengths in tokens."""

    rank: int
    modules: tuple[str, ...]
    dtype: str
    runs: int
    requests: int
    shape: Shape


class Measurement(msgspec.Struct, frozen=True):
    """Result of one case in one run."""

    case: str
    run: int
    summary: Summary
    messages: dict[str, str]  # one for each kind of error
    foreign_cpu: float  # share of all cores that neither the server nor the harness took


class Load(msgspec.Struct, frozen=True):
    """Timing of one new adapter on an idle server."""

    load_ms: float
    ttft_ms: float  # of the first request for it, sent when the load is answered
    base_ttft_ms: float  # of the same prompt to the base model

    @property
    def to_first_token_ms(self) -> float:
        """Time from the load call to the first token."""
        return self.load_ms + self.ttft_ms


class Costs(msgspec.Struct):
    """All measurements, and medians and ratios over them; runs and prints nothing."""

    measurements: list[Measurement] = []
    loads: list[Load] = []

    def rates(self, case: Case) -> dict[int, float]:
        """Return output tok/s by run, without runs that have no answer."""
        found = [one for one in self.measurements if one.case == case.name and one.summary.ok]
        return {one.run: one.summary.output_tok_s for one in found}

    def rate(self, case: Case) -> float:
        """Return the median rate over the runs; NaN without any."""
        rates = self.rates(case).values()
        return median(rates) if rates else math.nan

    def ratio(self, case: Case, to: Case = BASE) -> float:
        """Return the median over runs of the rate relative to `to`; NaN without any."""
        under = self.rates(to)
        ratios = [rate / under[run] for run, rate in self.rates(case).items() if run in under]
        return median(ratios) if ratios else math.nan

    def load(self) -> dict[str, float]:
        """Return medians in ms, each taken on its own; empty without loads."""
        if not self.loads:
            return {}
        return {
            "load": median(one.load_ms for one in self.loads),
            "ttft": median(one.ttft_ms for one in self.loads),
            "load to first token": median(one.to_first_token_ms for one in self.loads),
            "base ttft": median(one.base_ttft_ms for one in self.loads),
        }

    def show(self) -> str:
        header = ["", "tok/s", f"of {BASE.name}", "inter-token p50, ms", "foreign CPU", "failed"]
        rows = [self._row(case) for case in CASES if self._of(case)]
        lines = [table(header, rows) if rows else "nothing was measured"]
        if not math.isnan(thrash := self.ratio(THRASH, FITTING)):
            lines.append(f"{THRASH.name}: {thrash:.2f} of {FITTING.name}")
        if load := self.load():
            lines.append(
                f"adapter load to first token: {number(load['load to first token'])} ms (load"
                f" {number(load['load'])}, first token {number(load['ttft'])}; of the base model"
                f" {number(load['base ttft'])}), medians of {len(self.loads)}"
            )
        return "\n".join(lines)

    def to_values(self) -> dict[str, Any]:
        """Return all results for JSON."""
        return {
            "output_tok_s": {case.name: self.rate(case) for case in CASES},
            "ratios": {case.name: self.ratio(case) for case in CASES},
            "thrash_to_fitting": self.ratio(THRASH, FITTING),
            "load_ms": self.load(),
            **msgspec.to_builtins(self),
        }

    def _of(self, case: Case) -> list[Measurement]:
        return [one for one in self.measurements if one.case == case.name]

    def _row(self, case: Case) -> list[str]:
        mine = self._of(case)
        gaps = [one.summary.inter_token_ms.p50 for one in mine if one.summary.ok]
        foreign = max(one.foreign_cpu for one in mine)
        ratio = self.ratio(case)
        return [
            case.name,
            number(self.rate(case)),
            "-" if math.isnan(ratio) else f"{ratio:.3f}",
            number(median(gaps) if gaps else math.nan),
            f"{foreign:.1%}" + (" (!)" if foreign > QUIET else ""),
            str(sum(sum(one.summary.errors.values()) for one in mine)),
        ]


def adapter_count(server: str) -> int:
    """Return how many adapters the cases of a server need."""
    return max(case.adapters for case in CASES if case.server == server)


def adapter(index: int) -> str:
    """Return the adapter's name, also that of its directory below the root."""
    return f"adapter-{index}"


def names(case: Case) -> tuple[str | None, ...]:
    """Return the adapters that the requests of a case name in turn."""
    return tuple(adapter(index) for index in range(case.adapters)) or (None,)


def engine(server: str, settings: Settings, root: Path) -> Engine:
    """Return a server with KV for twice the tokens in flight; LoRA off means no --lora-root."""
    tokens = 2 * IN_FLIGHT * (settings.shape.prompt + settings.shape.answer + 16)  # part pages
    flags = ["--dtype", settings.dtype, "--kv-tokens", str(tokens)]
    if server != OFF:
        slots = FEW_SLOTS if server == FEW else IN_FLIGHT
        flags += ["--lora-root", str(root), "--max-lora-rank", str(settings.rank)]
        flags += ["--max-loras-per-batch", str(slots), "--max-loaded-loras", str(2 * IN_FLIGHT)]
    return tokenloom(sys.executable, f"LoRA {server}", tuple(flags))


def workload(case: Case, run: int, settings: Settings, *, warm: bool = False) -> Workload:
    """Return unseen prompts; `warm`: one per request in flight, with short answers."""
    source = Source(f"{case.name}/{run}")
    count = IN_FLIGHT if warm else settings.requests
    shape = Shape(settings.shape.prompt, WARM_ANSWER) if warm else settings.shape
    sessions = independent(source, count, shape, name="warm" if warm else "independent")
    return (Stream(case.name, sessions, Closed(IN_FLIGHT)),)


def main(argv: list[str]) -> int:
    """Run it; return 0 all answered, 1 something failed, 2 wrong flags, 130 interrupted."""
    flags = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    costs, status = Costs(), 0
    try:
        _measure(_settings(flags), costs)
    except (EngineFailed, ClientError, OSError) as error:
        _say(f"lora: {error}")
        status = 1
    except KeyboardInterrupt:
        _say("interrupted; what was measured so far:")
        status = 130
    print(costs.show())
    if flags.json is not None:
        said = {name: value for name, value in vars(flags).items() if name != "json"}
        head = {"machine": describe(), "model": EMBEDDED_NAME, "flags": said}
        flags.json.write_bytes(as_json({**head, **costs.to_values()}))
    return status or int(any(one.summary.errors for one in costs.measurements))


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _measure(settings: Settings, costs: Costs) -> None:
    """Measure all cases into `costs`. Raises EngineFailed, ClientError or OSError."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenloom-lora-")))
        _say(f"writing {adapter_count(MANY)} adapters of rank {settings.rank}")
        for index in range(adapter_count(MANY)):
            path = root / adapter(index)
            write_adapter(path, index, settings.rank, modules=settings.modules)
        servers: dict[str, Running] = {}
        for server in (OFF, MANY, FEW):
            started = stack.enter_context(running(engine(server, settings, root), root))
            servers[server] = started
            _run(_load_all(started, root, adapter_count(server)))
            _say(f"LoRA {server}: ready after {started.start_seconds:.1f} s")
        for run in range(settings.runs):
            for case in CASES:
                costs.measurements.append(one := _one(case, run, settings, servers))
                _say(f"{case.name} #{run + 1}: {number(one.summary.output_tok_s)} tok/s,"
                     f" foreign {one.foreign_cpu:.1%}"
                     + "".join(f"; {message}" for message in one.messages.values()))  # fmt: skip
                servers[case.server].check()
        costs.loads += _run(_loads(servers[MANY], root, settings))


def _one(case: Case, run: int, settings: Settings, servers: Mapping[str, Running]) -> Measurement:
    server = servers[case.server]
    _run(_drive(server, case, workload(case, run, settings, warm=True)))
    meter = CpuMeter(server.pid)
    done = _run(_drive(server, case, workload(case, run, settings)))
    foreign = meter.read().foreign
    return Measurement(case.name, run, summarise(done.records), done.messages, foreign)


def _client(server: Running) -> AsyncClient:
    port = urlsplit(server.base_url).port
    assert port is not None, "engines choose one"
    return AsyncClient(port=port)


async def _drive(server: Running, case: Case, work: Workload) -> Run:
    async with _client(server) as client:
        with Progress(work) as progress:
            target = SocketTarget(client, names(case))
            return await run_workload(work, Driver(target, REQUEST_SECONDS, on_record=progress))


async def _load_all(server: Running, root: Path, count: int) -> None:
    async with _client(server) as client:
        for index in range(count):
            await client.load_lora(adapter(index), str(root / adapter(index)))


async def _loads(server: Running, root: Path, settings: Settings) -> list[Load]:
    """Load and unload adapters under new names."""
    prompts = independent(Source("loads"), LOADS, settings.shape)
    loads = []
    async with _client(server) as client:
        for index, (turn,) in enumerate(prompts):
            base = await _first_token(client, turn.tokens, None)
            name, started = f"new-{index}", time.perf_counter()
            await client.load_lora(name, str(root / adapter(index)))
            loaded = time.perf_counter() - started
            first = await _first_token(client, turn.tokens, name)
            loads.append(Load(loaded * 1e3, first * 1e3, base * 1e3))
            await client.unload_lora(name)
    return loads


async def _first_token(client: AsyncClient, prompt: Sequence[int], adapter: str | None) -> float:
    """Return the seconds from sending a request to its first token."""
    sent = time.perf_counter()
    await client.complete(
        input_ids=prompt, lora_path=adapter, max_new_tokens=1, ignore_eos=True, temperature=0.0
    )
    return time.perf_counter() - sent


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _settings(flags: argparse.Namespace) -> Settings:
    shape = Shape(flags.prompt_tokens, flags.answer_tokens)
    return Settings(flags.rank, flags.modules, flags.dtype, flags.runs, flags.requests, shape)


def _modules(text: str) -> tuple[str, ...]:
    known = {module.rpartition(".")[2]: module for module in MODULES}
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(text.split(",")))


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom.bench.lora",
        description="Measure what adapters cost on the embedded model: output tok/s with "
        f"{IN_FLIGHT} requests in flight, as ratios to a server without adapters.",
        allow_abbrev=False,
    )
    default = "(default: %(default)s)"

    def count(flag: str, default_count: int, about: str) -> None:
        help_text = f"{about} {default}"
        parser.add_argument(
            flag, type=_at_least_one, default=default_count, metavar="N", help=help_text
        )

    count("--rank", 8, "of all adapters")
    parser.add_argument(
        "--modules",
        type=_modules,
        metavar="A,B",
        default=",".join(module.rpartition(".")[2] for module in MODULES),
        help=f"what they change in each layer {default}",
    )
    parser.add_argument(
        "--dtype", default="auto", help=f"of the servers, as of `tokenloom serve` {default}"
    )
    count("--runs", 3, "times through all cases; medians are shown")
    count("--requests", 128, f"of each case and run, {IN_FLIGHT} in flight")
    count("--prompt-tokens", 32, "of each request")
    count("--answer-tokens", 64, "of each request")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
