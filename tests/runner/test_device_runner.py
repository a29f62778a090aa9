"""The device runner under the real scheduler and loop, kernels interpreted, against the CPU's.

The stand-in for the device poisons what a real one leaves undefined, and replays graphs by calling
what was captured: the numbers of a step that a graph bakes in would show.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from runner.fake_device import FakeDevice
from support.interpreted import as_if_on_device
from support.peft_adapters import EVERY_MODULE, save_adapter

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.core.intake import Limits
from tokenloom.scheduler_proc.core.scheduler import Scheduler
from tokenloom.scheduler_proc.event_loop import event_loop
from tokenloom.scheduler_proc.models.device_batch import Layout
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_model
from tokenloom.scheduler_proc.runner.device_loading import (
    DeviceSource,
    _Builder,
    make_device_runner,
)
from tokenloom.scheduler_proc.runner.device_lora import DeviceLoRASlots, staged
from tokenloom.scheduler_proc.runner.device_runner import DeviceModelRunner, largest_layout
from tokenloom.scheduler_proc.runner.facts import Runner, RunnerFacts
from tokenloom.scheduler_proc.runner.kv_pool import KVShape
from tokenloom.scheduler_proc.runner.lora_loader import load_adapter
from tokenloom.scheduler_proc.runner.model_runner import LoadedModel, ModelRunner
from tokenloom.wire.config import ExecutionConfig
from tokenloom.wire.device_defaults import resolve_scheduling
from tokenloom.wire.messages import (
    BatchTokenIDOut,
    DrainReq,
    LoadLoRAReq,
    LoRARef,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
)
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig, SchedulingFlags

pytestmark = pytest.mark.slow

VOCAB, CONTEXT, POOL = 60, 64, 96
SCHEDULING = SchedulingConfig(
    max_running_requests=3,
    page_size=4,
    max_prefill_tokens=24,
    chunked_prefill_size=16,
    mixed_chunk_size=16,
)
EXECUTION = ExecutionConfig(kv_tokens=POOL, dtype="float32")
MAX_LORAS, RANK = 2, 4
NONE: list[LoRARef] = []
GREEDY = {"temperature": 0.0, "seed": 0}
DRAWN = {"temperature": 1.0, "top_k": 9, "frequency_penalty": 0.5, "seed": 5}
BIASED = {"temperature": 1.0, "top_p": 0.8, "seed": 6, "logit_bias": {7: 3.0}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def model(checkpoint: Path) -> LlamaForCausalLM:
    return load_model(
        str(checkpoint),
        dtype=torch.float32,
        device="cpu",
        load_format="auto",
        context_length=CONTEXT,
    )


def on_device(
    model: LlamaForCausalLM, device: FakeDevice, max_loras: int = 0, **execution: object
) -> Runner:
    def read(path: Path) -> object:
        adapter = load_adapter(path, model.spec, [path], RANK)
        return staged(adapter, torch.float32, pinned=False)

    source = DeviceSource(model, torch.float32, VOCAB - 3, "float32", read, max_loras, RANK)  # type: ignore[arg-type]
    options = {"kv_tokens": POOL, "dtype": "float32", **execution}
    return make_device_runner(device, source, SCHEDULING, ExecutionConfig(**options))  # type: ignore[arg-type]


def on_cpu(model: LlamaForCausalLM, max_loras: int = 0) -> ModelRunner:
    spec = model.spec
    loaded = LoadedModel(
        model,
        KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32),
        CONTEXT,
        VOCAB - 3,
        "float32",
        lambda path: model.resident(load_adapter(path, spec, [path], RANK)),
    )
    return ModelRunner(loaded, SCHEDULING, EXECUTION, max_loras)


class Answers:
    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.ended = 0

    def send(self, message: ToDetokenizer) -> None:
        for row in message.rows if isinstance(message, BatchTokenIDOut) else ():
            assert row.finish is None or row.finish.reason == "length", row
            self.ids[row.rid] += row.token_ids
            self.ended += row.finish is not None


class Turns:
    """A mailbox: the messages of each turn, and a drain when every request has ended."""

    def __init__(self, turns: list[list[ToScheduler]], answers: Answers) -> None:
        self._turns = turns
        self._answers = answers
        self._asked = sum(map(len, turns))

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        if self._turns:
            return self._turns.pop(0)
        return [DrainReq()] if self._answers.ended == self._asked else []


def ask(
    rid: int, length: int, max_new: int, sampling: dict[str, object], lora_id: int = 0
) -> TokenizedGenerateReq:
    ids = torch.tensor([(rid * 11 + i * i) % (VOCAB - 3) for i in range(length)], dtype=torch.int32)
    params = SamplingParams(max_new_tokens=max_new, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return TokenizedGenerateReq(rid, ids.numpy().tobytes(), params, lora_id=lora_id)


def serve(
    runner: Runner, turns: list[list[ToScheduler]], *, overlap: bool, adapters: list[LoRARef] = NONE
) -> dict[int, list[int]]:
    limits = Limits(VOCAB - 3, CONTEXT, POOL, frozenset(), runner.facts.max_loras)
    scheduler = Scheduler(SCHEDULING, limits, runner.facts.num_pages)
    for ref in adapters:
        scheduler.handle(LoadLoRAReq(ref))
    runner.loras.follow(scheduler.take_lora_orders())
    while runner.loras.loading:
        for loaded in runner.loras.take_loaded():
            assert loaded.ok, loaded
            scheduler.lora_loaded(loaded)
    answers = Answers()
    event_loop(scheduler, runner, Turns(turns, answers), answers, overlap=overlap)
    scheduler.check()
    return answers.ids


def mixed_turns() -> list[list[ToScheduler]]:
    """A prompt in pieces beside decodes, a row used again, each kind of sampling."""
    return [
        [ask(1, 5, 4, GREEDY), ask(2, 22, 3, DRAWN)],
        [ask(3, 9, 3, BIASED)],
        [ask(4, 7, 2, GREEDY)],
    ]


@pytest.mark.parametrize(
    ("graphs", "overlap"), [(True, True), (False, False)], ids=["graphs, overlapped", "plain"]
)
def test_answers_are_those_of_the_cpu(
    model: LlamaForCausalLM,
    graphs: bool,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = serve(on_cpu(model), mixed_turns(), overlap=False)
    assert {rid: len(ids) for rid, ids in expected.items()} == {1: 4, 2: 3, 3: 3, 4: 2}
    as_if_on_device(monkeypatch)
    device = FakeDevice()
    runner = on_device(model, device, disable_cuda_graph=not graphs)
    captured = len(device.graphs)
    assert serve(runner, mixed_turns(), overlap=overlap) == expected
    assert any(graph.replays for graph in device.graphs) == graphs
    assert len(device.graphs) == captured, "nothing is captured under requests"


def test_adapters_come_and_go_between_replays(
    model: LlamaForCausalLM, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three adapters behind two slots, embedding and head among their modules, beside the base."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    refs = []
    for lora_id in (1, 2, 3):
        path = tmp_path / str(lora_id)
        save_adapter(base, path, seed=lora_id, target_modules=EVERY_MODULE, r=lora_id)
        refs.append(LoRARef(lora_id, f"a{lora_id}", str(path)))

    def turns() -> list[list[ToScheduler]]:
        return [[ask(i, 6, 3, GREEDY, lora_id=i % 4) for i in range(5)]]

    expected = serve(on_cpu(model, MAX_LORAS), turns(), overlap=False, adapters=refs)
    assert len({tuple(ids) for ids in expected.values()}) > 3
    as_if_on_device(monkeypatch)
    device = FakeDevice()
    runner = on_device(model, device, MAX_LORAS)
    assert serve(runner, turns(), overlap=True, adapters=refs) == expected
    assert sum(graph.replays for graph in device.graphs) > 2


class Shrinking(FakeDevice):
    """Tells what is free from a list, in the order in which the start asks."""

    def __init__(self, *free: int, peak: int) -> None:
        super().__init__()
        self._free, self._peak = list(free), peak

    def free_bytes(self) -> int:
        return self._free.pop(0)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self._peak


BYTES_PER_TOKEN = 2 * 2 * 16 * 4  # keys and values of two heads in one layer, float32


def test_the_pool_takes_what_the_largest_step_and_all_graphs_leave(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three graphs are measured: the first brings what they share, the third is like the
    second.
    """
    as_if_on_device(monkeypatch)
    device = Shrinking(100_000, 70_000, 65_000, 100_000, peak=20_000)
    runner = on_device(model, device, kv_tokens=None)
    left = 100_000 - 20_000 - (30_000 + 2 * 5_000)
    expected = int(left * 0.9) // BYTES_PER_TOKEN // SCHEDULING.page_size * SCHEDULING.page_size
    assert runner.facts.max_total_tokens == expected


def test_graphs_that_only_measure_memory_share_no_stream_with_those_that_serve(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending the former frees the workspace of their stream."""
    as_if_on_device(monkeypatch)
    device = FakeDevice()
    on_device(model, device)
    trials, serving = device.graphs[:2], device.graphs[2:]
    assert trials
    assert serving
    assert len({graph.stream for graph in trials}) == 1
    assert len({graph.stream for graph in serving}) == 1
    assert trials[0].stream != serving[0].stream


def test_the_copies_around_a_step_run_before_any_request(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_device(monkeypatch)
    put, copied = Mock(), Mock(side_effect=DeviceModelRunner._copy_pages)
    monkeypatch.setattr(DeviceLoRASlots, "put", put)
    monkeypatch.setattr(DeviceModelRunner, "_copy_pages", lambda *args: copied(*args))
    device = FakeDevice()
    monkeypatch.setattr(device, "download", downloaded := Mock(side_effect=device.download))
    runner = on_device(model, device, max_loras=1)
    assert copied.call_count == downloaded.call_count == put.call_count == 1
    assert isinstance(runner, DeviceModelRunner)
    assert not runner._state.page_table.any()


class Measuring(FakeDevice):
    """Notes the steps that are run while memory is measured."""

    def __init__(self, forward: Mock) -> None:
        super().__init__()
        self._forward = forward
        self.measured: list[Layout] = []

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self._forward.reset_mock()
        run()
        self.measured += [call.args[1] for call in self._forward.call_args_list]
        return 0


def test_memory_is_measured_for_the_most_tokens_and_the_most_logits(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_device(monkeypatch)
    forward = Mock(side_effect=_Builder._forward)
    monkeypatch.setattr(_Builder, "_forward", lambda *args: forward(*args))
    device = Measuring(forward)
    on_device(model, device)
    assert device.measured == [Layout(tokens=16, requests=3, samples=3, decodes=0)]


def test_the_sizes_of_a_cuda_device_are_what_its_largest_step_has_room_for() -> None:
    scheduling = resolve_scheduling(SchedulingFlags(), "cuda")
    facts = RunnerFacts(
        vocab_size=VOCAB,
        context_length=CONTEXT,
        page_size=scheduling.page_size,
        max_total_tokens=0,
        num_pages=1,
        dtype_name="bfloat16",
        max_running_requests=scheduling.max_running_requests,
        max_loras=0,
        on_device=True,
    )
    largest = largest_layout(facts, scheduling)
    assert (largest.tokens, largest.requests, largest.samples) == (8192 + 256, 256, 256)


def test_a_device_without_room_beside_its_graphs_is_refused(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_device(monkeypatch)
    device = Shrinking(60_000, 30_000, 25_000, 60_000, peak=20_000)
    with pytest.raises(ModelError, match="--kv-tokens"):
        on_device(model, device, kv_tokens=None)
