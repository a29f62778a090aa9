"""The plan of the benchmark of adapters, its ratios and its table; no server is started here."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import pytest

from tokenloom.bench import lora
from tokenloom.bench.load import Driver, run_workload
from tokenloom.bench.lora import (
    BASE,
    CASES,
    FITTING,
    THRASH,
    Case,
    Costs,
    Load,
    Measurement,
    Settings,
)
from tokenloom.bench.random_adapters import MODULES
from tokenloom.bench.report import as_json
from tokenloom.bench.summary import Record, summarise
from tokenloom.bench.targets import SocketTarget
from tokenloom.bench.workloads import Closed, Session, Shape
from tokenloom.client import AsyncClient, RequestRefused
from tokenloom.client.aio import AsyncGeneration
from tokenloom.client.link import Exchange
from tokenloom.client.request import Messages, RequestOptions
from tokenloom.flags import parse_flags
from tokenloom.wire.config import ServerConfig

SETTINGS = Settings(8, MODULES, "int8", runs=2, requests=40, shape=Shape(6, 5))
ONE, EIGHT = CASES[2], CASES[3]


def config(server: str) -> ServerConfig:
    command = lora.engine(server, SETTINGS, Path("/adapters")).command
    flags = [part.replace("{port}", "30000") for part in command]
    return parse_flags(flags[flags.index("serve") + 1 :])


def measured(case: Case, run: int, tokens: int, errors: int = 0) -> Measurement:
    """`tokens` in one second."""
    records = [Record(case.name, tokens, sent=0.0, ended=1.0, completion_tokens=tokens)]
    records = records if tokens else []
    records += [Record(case.name, 1, sent=0.0, ended=0.1, outcome="timeout")] * errors
    return Measurement(case.name, run, summarise(records), {}, foreign_cpu=0.01 * (run + 1))


def test_servers_have_the_slots_that_their_cases_are_about() -> None:
    assert not config(BASE.server).lora.enabled
    for case in CASES[1:]:
        settings = config(case.server).lora
        assert settings.enabled
        assert settings.max_lora_rank == SETTINGS.rank
        assert settings.max_loaded_loras >= lora.adapter_count(case.server) + 1  # a load beside it
        assert (case.adapters > settings.max_loras_per_batch) == (case is THRASH), case
    slots = config(THRASH.server).lora.max_loras_per_batch
    assert (FITTING.server, FITTING.adapters, THRASH.adapters) == (THRASH.server, slots, 2 * slots)
    assert {case.adapters for case in CASES} == {0, 1, 8, 16, 32}


def test_servers_differ_in_adapters_alone() -> None:
    off, *others = (config(server) for server in (lora.OFF, lora.MANY, lora.FEW))
    for other in others:
        assert (other.scheduling, other.execution) == (off.scheduling, off.execution)
    assert off.execution.dtype == "int8"
    tokens = off.execution.kv_tokens
    assert tokens is not None
    assert tokens >= lora.IN_FLIGHT * (SETTINGS.shape.prompt + SETTINGS.shape.answer)


def test_no_prompt_comes_twice() -> None:
    seen: list[Session] = []
    for case in CASES:
        for run in range(SETTINGS.runs):
            for warm, count in ((True, lora.IN_FLIGHT), (False, SETTINGS.requests)):
                [stream] = lora.workload(case, run, SETTINGS, warm=warm)
                assert stream.pace == Closed(lora.IN_FLIGHT)
                assert len(stream.sessions) == count
                seen += stream.sessions
    prompts = [turn.tokens for (turn,) in seen]
    assert {len(prompt) for prompt in prompts} == {SETTINGS.shape.prompt}
    assert len(set(prompts)) == len(prompts)


class Refusing(AsyncClient):
    """Notes the adapters that it is asked for."""

    def __init__(self) -> None:
        super().__init__("ipc:///nowhere")
        self.asked: list[str | None] = []

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGeneration:
        self.asked.append(options.get("lora_path"))

        async def refuse() -> Exchange:
            raise RequestRefused(404, "no such adapter")

        return AsyncGeneration(refuse, self.timeout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_requests_name_the_adapters_in_turn(case: Case) -> None:
    client = Refusing()
    work = lora.workload(case, 0, SETTINGS)
    run = asyncio.run(run_workload(work, Driver(SocketTarget(client, lora.names(case)), 1.0)))
    names = [f"adapter-{index}" for index in range(case.adapters)] or [None]
    assert client.asked == [names[turn % len(names)] for turn in range(SETTINGS.requests)]
    assert summarise(run.records).errors == {"status 404": SETTINGS.requests}


def test_a_ratio_is_that_of_the_same_run() -> None:
    costs = Costs()
    for run, (base, one) in enumerate([(100, 90), (1000, 500), (10, 8)]):
        costs.measurements += [measured(BASE, run, base), measured(ONE, run, one)]
    assert costs.rate(BASE) == 100.0
    assert costs.rate(ONE) == 90.0
    assert costs.ratio(BASE) == 1.0
    assert costs.ratio(ONE) == 0.8
    assert math.isnan(costs.ratio(EIGHT))


def test_a_run_without_answers_makes_no_ratio() -> None:
    costs = Costs([measured(BASE, 0, 100), measured(ONE, 0, 50), measured(ONE, 1, 10)])
    costs.measurements += [measured(BASE, 1, 0, errors=3)]
    assert costs.ratio(ONE) == 0.5
    assert costs.rate(BASE) == 100.0


@pytest.fixture
def costs() -> Costs:
    rates = dict(zip(CASES, (200, 199, 190, 150, 100, 140, 70), strict=True))
    measurements = [measured(case, run, rates[case]) for run in range(2) for case in CASES]
    measurements.append(measured(THRASH, 2, 0, errors=4))
    loads = [Load(10.0, 5.0, 2.0), Load(20.0, 4.0, 2.0), Load(12.0, 30.0, 2.0)]
    return Costs(measurements, loads)


def test_the_table(costs: Costs) -> None:
    header, *rows, thrash, load = costs.show().splitlines()
    assert "of LoRA off" in header
    assert [row.split("  ")[0] for row in rows] == [case.name for case in CASES]
    ratios = ["1.000", "0.995", "0.950", "0.750", "0.500", "0.700", "0.350"]
    for row, ratio in zip(rows, ratios, strict=True):
        assert ratio in row.split()
    assert rows[0].endswith("2.0%       0")
    assert rows[-1].endswith("3.0%       4")
    assert thrash == "16 adapters, 8 slots: 0.50 of 8 adapters, 8 slots"
    assert load.startswith("adapter load to first token: 24.0 ms (load 12.0, first token 5.00")
    assert load.endswith("of the base model 2.00), medians of 3")


def test_the_table_of_what_an_interrupted_run_has() -> None:
    assert Costs().show() == "nothing was measured"
    shown = Costs([measured(ONE, 0, 50), measured(BASE, 0, 100)]).show().splitlines()
    assert [line.split("  ")[0] for line in shown[1:]] == [BASE.name, ONE.name]


def test_everything_is_in_the_json(costs: Costs) -> None:
    said = json.loads(as_json(costs.to_values()))
    assert said["ratios"]["32 adapters"] == 0.5
    assert said["output_tok_s"]["LoRA off"] == 200.0
    assert said["thrash_to_fitting"] == 0.5
    assert said["load_ms"]["load to first token"] == 24.0
    assert len(said["measurements"]) == 2 * len(CASES) + 1
    assert said["measurements"][-1]["summary"]["errors"] == {"timeout": 4}
    assert len(said["loads"]) == 3


def test_flags() -> None:
    assert lora._parser().parse_args([]).modules == MODULES
    few = lora._parser().parse_args(["--modules", "down_proj,q_proj,q_proj"])
    assert few.modules == ("mlp.down_proj", "self_attn.q_proj")


@pytest.mark.parametrize(
    "bad", [["--modules", "q_proj,x"], ["--runs", "0"], ["--rank", "r"], ["--run", "3"]]
)
def test_wrong_flags(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        lora.main(bad)
    assert stopped.value.code == 2
    assert bad[0] in capsys.readouterr().err
