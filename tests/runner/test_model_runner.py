"""The model runner end to end: slot arithmetic with a hash model, then a tiny Llama as oracle.

The hash model keeps token ids and positions in the KV buffers and answers with a hash of the ids it
finds in a request's slots: one wrong slot is a wrong token.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NoReturn

import msgspec
import pytest
import torch
import transformers
from support.hash_model import VOCAB, hash_answer, next_id
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.core.intake import Limits
from tokenloom.scheduler_proc.core.scheduler import Scheduler
from tokenloom.scheduler_proc.models.forward_batch import ForwardBatch
from tokenloom.scheduler_proc.models.parallel import Shard
from tokenloom.scheduler_proc.runner.facts import Runner
from tokenloom.scheduler_proc.runner.kv_pool import KVShape
from tokenloom.scheduler_proc.runner.loading import (
    choose_kv_dtype,
    choose_mode,
    make_model_runner,
)
from tokenloom.scheduler_proc.runner.model_runner import LoadedModel, ModelRunner
from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch, RowOpen
from tokenloom.wire.config import ExecutionConfig, ModelConfig
from tokenloom.wire.messages import BatchTokenIDOut, TokenizedGenerateReq
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

CONTEXT = 100
NUM_ROWS = 6
GREEDY = SamplingParams(temperature=0.0)
PADDED_VOCAB = VOCAB + 31


class HashModel:
    """float32 buffers of one layer, one head, size 1: small integers are exact in them."""

    def __init__(self) -> None:
        self.broken_ids: set[int] = set()  # what a request's last id may not be

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        ids, positions = batch.k_cache[0], batch.v_cache[0]
        for tensor in (batch.input_ids, batch.positions, batch.out_cache_loc, batch.logit_indices):
            assert tensor.dtype == torch.int64
        assert batch.out_cache_loc.unique().numel() == batch.out_cache_loc.numel()
        ids[batch.out_cache_loc] = batch.input_ids[:, None, None].float()
        positions[batch.out_cache_loc] = batch.positions[:, None, None].float()
        ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
        logits = torch.full((len(batch.logit_indices), PADDED_VOCAB), 0.0)
        logits[:, VOCAB:] = 9.0
        for k, index in enumerate(batch.logit_indices.tolist()):
            request = ends.tolist().index(index)
            slots = batch.request_slots[request]
            length = batch.prefix_lens[request] + batch.extend_lens[request]
            assert positions[slots].flatten().tolist() == list(range(length))
            found = [int(i) for i in ids[slots].flatten().tolist()]
            logits[k, next_id(found)] = 1.0
            if found[-1] in self.broken_ids:
                logits[k] = torch.nan
        return logits


def no_adapter(path: Path) -> NoReturn:
    raise AssertionError(f"nobody asked for {path}")


def hash_runner(page_size: int, kv_tokens: int, model: HashModel | None = None) -> ModelRunner:
    loaded = LoadedModel(
        model or HashModel(),
        KVShape(1, 1, 1, torch.float32),
        CONTEXT,
        VOCAB,
        "float32",
        no_adapter,
    )
    return ModelRunner(
        loaded,
        SchedulingConfig(max_running_requests=NUM_ROWS, page_size=page_size),
        ExecutionConfig(kv_tokens=kv_tokens),
    )


@dataclasses.dataclass
class Request:
    """A request being computed: its row, its pages, and all ids known so far."""

    row: int
    prompt: list[int]
    ids: list[int]
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)


class Driver:
    """A policy-free stand-in for the scheduler: makes batches, hands out pages and rows."""

    def __init__(self, runner: ModelRunner, random: Random) -> None:
        self.runner = runner
        self.free_pages = list(range(1, runner.facts.num_pages))
        random.shuffle(self.free_pages)
        self.steps = 0
        self._opened: list[RowOpen] = []
        self._new_pages: list[tuple[int, int, int]] = []

    def open(self, row: int, prompt: list[int], sampling: SamplingParams = GREEDY) -> Request:
        self._opened.append(RowOpen(row, sampling, array("i", prompt), array("i"), ()))
        return Request(row, prompt, list(prompt))

    def close(self, request: Request) -> None:
        self.free_pages = request.pages + self.free_pages

    def share(self, request: Request, pages: list[int]) -> None:
        """The request starts on these pages, which another one has filled."""
        self._give(request, pages)
        request.computed = len(pages) * self.runner.facts.page_size

    def _give(self, request: Request, pages: list[int]) -> None:
        start = len(request.pages)
        self._new_pages += [(request.row, start + i, page) for i, page in enumerate(pages)]
        request.pages += pages

    def step(self, requests: Sequence[Request], counts: Sequence[int]) -> list[int]:
        """Compute the next `counts[i]` ids of each request; sampled ids are appended to them."""
        ids = array("i")
        samples = []
        decodes = [
            count == 1 and len(request.prompt) <= request.computed == len(request.ids) - 1
            for request, count in zip(requests, counts, strict=True)
        ]
        num_decodes = [*decodes, False].index(False)  # the rest are extends, of one token or more
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            end = request.computed + count
            if index >= num_decodes:  # else the runner knows what it has sampled
                ids.extend(request.ids[request.computed : end])
            samples.append(end == len(request.ids))
            while len(request.pages) * self.runner.facts.page_size < end:
                self._give(request, [self.free_pages.pop()])
        self.steps += 1
        batch = ModelWorkerBatch(
            step=self.steps,
            mode=ForwardMode.DECODE if num_decodes == len(requests) else ForwardMode.MIXED,
            num_decodes=num_decodes,
            rows=[request.row for request in requests],
            prefix_lens=[request.computed for request in requests],
            extend_lens=list(counts),
            samples=samples,
            input_ids=ids,
            new_pages=self._new_pages,
            opened=self._opened,
        )
        self._opened, self._new_pages = [], []
        result = self.runner.launch(batch).result()
        assert result.step == self.steps
        assert len(result.next_ids) == sum(samples)
        sampled = iter(result.next_ids)
        for request, count, yields in zip(requests, counts, samples, strict=True):
            request.computed += count
            if yields:
                request.ids.append(next(sampled))
        return result.next_ids


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_every_slot_is_where_the_page_table_says(page_size: int, seed: int) -> None:
    """Random prompts, chunks, mixes and finishes over few rows and a pool that is always reused."""
    random = Random(seed)
    driver = Driver(hash_runner(page_size, kv_tokens=NUM_ROWS * 112), random)
    rows = list(range(NUM_ROWS))
    running: list[Request] = []
    finished = 0
    while finished < 25:
        while rows and random.random() < 0.5:
            prompt = [random.randrange(VOCAB) for _ in range(random.randrange(1, 80))]
            running.append(driver.open(rows.pop(random.randrange(len(rows))), prompt))
        chosen = [request for request in running if random.random() < 0.8]
        random.shuffle(chosen)
        if not chosen:
            continue
        driver.step(chosen, [random.randint(1, len(r.ids) - r.computed) for r in chosen])
        for request in chosen:
            if len(request.ids) - len(request.prompt) > random.randrange(1, 20):
                answer = request.ids[len(request.prompt) :]
                assert answer == hash_answer(request.prompt, len(answer), frozenset())
                running.remove(request)
                driver.close(request)
                rows.append(request.row)
                finished += 1


def test_a_shared_prefix_is_read_from_anothers_pages() -> None:
    driver = Driver(hash_runner(4, kv_tokens=64), Random(0))
    first = driver.open(0, list(range(1, 10)))
    driver.step([first], [9])
    second = driver.open(3, [*range(1, 9), 50, 51])
    driver.share(second, first.pages[:2])
    driver.step([first, second], [1, 2])
    assert second.ids[-1] == next_id(second.prompt)
    assert first.ids[9:] == hash_answer(first.prompt, 2, frozenset())


def test_a_step_of_inner_chunks_samples_nothing() -> None:
    driver = Driver(hash_runner(4, kv_tokens=64), Random(0))
    request = driver.open(2, list(range(20)))
    assert driver.step([request], [7]) == []
    assert driver.step([request], [12]) == []
    assert driver.step([request], [1]) == [next_id(range(20))]


def test_a_context_may_be_filled_to_its_last_token() -> None:
    driver = Driver(hash_runner(16, kv_tokens=112), Random(0))
    request = driver.open(0, [5] * (CONTEXT - 1))
    driver.step([request], [CONTEXT - 1])
    assert driver.step([request], [1]) == [next_id(request.ids[:CONTEXT])]


def test_a_row_that_is_not_finite_reports_minus_1_and_the_others_go_on() -> None:
    model = HashModel()
    model.broken_ids = {13}
    driver = Driver(hash_runner(4, kv_tokens=128, model=model), Random(0))
    prompts = [[1, 2, 3], [4, 13], [5, 6]]
    requests = [driver.open(row, prompt) for row, prompt in enumerate(prompts)]
    assert driver.step(requests, [3, 2, 2]) == [next_id(prompts[0]), -1, next_id(prompts[2])]


def test_a_decode_starts_from_what_its_row_has_sampled_last() -> None:
    """Whoever had the row before, and whoever runs beside it."""
    driver = Driver(hash_runner(4, kv_tokens=128), Random(0))
    before = driver.open(2, [4, 5, 6])
    driver.step([before], [3])
    driver.close(before)
    first, second = driver.open(2, [1, 2, 3]), driver.open(0, [7, 8])
    driver.step([first, second], [3, 1])
    driver.step([first, second], [1, 1])
    driver.step([second, first], [1, 1])
    assert first.ids[3:] == hash_answer([1, 2, 3], 3, frozenset())
    assert second.ids[2:] == hash_answer([7, 8], 2, frozenset())


def test_a_failed_row_has_some_id_for_a_step_launched_before_that_is_known() -> None:
    model = HashModel()
    model.broken_ids = {13}
    driver = Driver(hash_runner(4, kv_tokens=128, model=model), Random(0))
    request = driver.open(1, [4, 13])
    assert driver.step([request], [2]) == [-1]
    assert driver.step([request], [1]) == [next_id([4, 13, 0])]


def test_on_a_cpu_a_step_is_computed_by_its_launch() -> None:
    assert not hash_runner(4, kv_tokens=64).facts.on_device


def test_seeded_draws_do_not_depend_on_row_or_company() -> None:
    wild = SamplingParams(temperature=2.0, seed=7)
    alone = Driver(hash_runner(4, kv_tokens=256), Random(0))
    request = alone.open(0, [1, 2, 3], wild)
    alone.step([request], [3])
    for _ in range(10):
        alone.step([request], [1])
    crowd = Driver(hash_runner(1, kv_tokens=256), Random(1))
    other = crowd.open(1, [9] * 30, SamplingParams(temperature=1.0, seed=7))
    same = crowd.open(5, [1, 2, 3], wild)
    crowd.step([other, same], [30, 2])
    crowd.step([same, other], [1, 1])
    for _ in range(10):
        crowd.step([other, same], [1, 1])
    assert same.ids == request.ids
    assert len(set(same.ids)) > 5


def test_facts_for_core_and_front() -> None:
    runner = hash_runner(16, kv_tokens=100)
    assert runner.facts.vocab_size == VOCAB
    assert runner.facts.context_length == CONTEXT
    assert (runner.facts.page_size, runner.facts.num_pages, runner.facts.max_total_tokens) == (
        16,
        7,
        96,
    )
    assert runner.facts.dtype_name == "float32"


def test_a_pool_that_cannot_work_is_refused() -> None:
    with pytest.raises(ModelError, match="--kv-tokens 15 is too small"):
        hash_runner(16, kv_tokens=15)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 120 ids with a tokenizer that knows 100 of them."""
    path = tmp_path_factory.mktemp("tiny_llama")
    config = transformers.LlamaConfig(
        vocab_size=120,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    vocab = {f"word{i}": i for i in range(100)}
    Tokenizer(WordLevel(vocab, unk_token="word0")).save(str(path / "tokenizer.json"))
    return path


def reference_answer(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy ids of transformers in float32, recomputed from scratch for each token."""
    model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1, :100]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def one_thread() -> Iterator[ExecutionConfig]:
    """Building a runner sets the process's thread count."""
    threads = torch.get_num_threads()
    yield ExecutionConfig(kv_tokens=512, cpu_threads=1, dtype="float32")
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_configuration_reaches_torch(tiny_llama: Path, one_thread: ExecutionConfig) -> None:
    runner = make_model_runner(
        ModelConfig(model=str(tiny_llama)),
        SchedulingConfig(),
        msgspec.structs.replace(one_thread, dtype="bfloat16"),
    )
    assert torch.get_num_threads() == 1
    assert runner.facts.dtype_name == "bfloat16"
    assert runner.facts.context_length == 256
    driver = Driver(runner, Random(0))
    request = driver.open(0, [1, 2, 3], SamplingParams(seed=1))
    assert 0 <= driver.step([request], [3])[0] < 100


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tiny_llama_answers_as_in_transformers(
    tiny_llama: Path, page_size: int, one_thread: ExecutionConfig
) -> None:
    runner = make_model_runner(
        ModelConfig(model=str(tiny_llama), context_length=128),
        SchedulingConfig(max_running_requests=3, page_size=page_size),
        one_thread,
    )
    assert (runner.facts.vocab_size, runner.facts.context_length) == (100, 128)
    driver = Driver(runner, Random(0))
    random = Random(1)
    prompts = [[random.randrange(100) for _ in range(n)] for n in (7, 33, 50)]
    first, second, third = (driver.open(row, prompt) for row, prompt in enumerate(prompts))
    driver.step([first], [7])
    driver.step([first, second], [1, 20])  # a chunk beside a decode
    driver.step([first, second, third], [1, 13, 17])
    driver.step([first, second, third], [1, 1, 33])
    for _ in range(12):
        driver.step([first, second, third], [1, 1, 1])
    for request in (first, second, third):
        answer = request.ids[len(request.prompt) :]
        assert len(answer) > 12
        assert len(set(answer)) > 3
        assert answer == reference_answer(tiny_llama, request.prompt, len(answer))


def answers_beside(runner: Runner, settings: SchedulingConfig, times: Random) -> tuple[Any, Any]:
    """Token ids of eight requests of a crowd, and the sizes of the steps that computed them."""
    limits = Limits(100, 256, runner.facts.max_total_tokens, frozenset())
    scheduler = Scheduler(settings, limits, runner.facts.num_pages)
    answers: dict[int, list[int]] = {}
    steps = []
    for rid in range(1, 9):
        ids = array("i", [(rid * 7 + i * i) % 100 for i in range(12 * rid)])
        params = SamplingParams(max_new_tokens=24, seed=rid, temperature=rid % 2)
        scheduler.handle(TokenizedGenerateReq(rid, ids.tobytes(), params))
    while (batch := scheduler.get_next_batch_to_run()) is not None:
        steps.append(batch.extend_lens)
        seconds = 10.0 ** times.uniform(-4.0, 0.0)
        result = runner.launch(batch).result()
        for message in scheduler.process_batch_result(result, seconds):
            assert isinstance(message, BatchTokenIDOut)
            for row in message.rows:
                answers.setdefault(row.rid, []).extend(row.token_ids)
    return answers, steps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_whatever_steps_take_answers_have_the_same_bits(
    tiny_llama: Path, dtype: Literal["int8", "int4"], one_thread: ExecutionConfig
) -> None:
    """How prompts are cut follows from measured times; what is answered does not."""
    settings = SchedulingConfig(max_running_requests=6, decode_gap_ms=99.0, chunked_prefill_size=96)
    execution = msgspec.structs.replace(one_thread, dtype=dtype, kv_tokens=1024)
    answers, steps = [], []
    for seed in range(4):
        runner = make_model_runner(ModelConfig(model=str(tiny_llama)), settings, execution)
        got, sizes = answers_beside(runner, settings, Random(seed))
        answers.append(got)
        steps.append(sizes)
    assert all(one == answers[0] for one in answers)
    assert {len(ids) for ids in answers[0].values()} == {24}
    assert len({str(one) for one in steps}) > 2, "the steps did differ"


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "page_size", "said"),
    [
        ("float32", "int8", 16, r"--kv-cache-dtype int8 .* --dtype float32"),
        ("bfloat16", "int8", 16, r"--kv-cache-dtype int8 .* --dtype bfloat16"),
        ("float32", "bfloat16", 16, r"--kv-cache-dtype bfloat16 .* --dtype float32"),
        ("int8", "int8", 8, r"--page-size 8 .* --kv-cache-dtype int8"),
        ("int4", "auto", 48, r"--page-size 48"),
    ],
)
def test_a_cache_that_the_mode_cannot_have_is_refused(
    dtype: str, kv_cache_dtype: str, page_size: int, said: str, tiny_llama: Path
) -> None:
    execution = ExecutionConfig(dtype=dtype, kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        make_model_runner(
            ModelConfig(model=str(tiny_llama)), SchedulingConfig(page_size=page_size), execution
        )


REFUSED = [
    ({"device": "cuda"}, "sees no CUDA device"),
    ({"dtype": "float16"}, "--dtype float16 needs a CUDA device"),
    ({"dtype": "int8", "kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3 needs a CUDA device"),
    ({"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"}, "fp8 for CUDA devices"),
]


@pytest.mark.parametrize(("execution", "why"), REFUSED)
def test_what_this_machine_cannot_do_is_refused_by_name(
    tiny_llama: Path, execution: dict[str, str], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        make_model_runner(
            ModelConfig(model=str(tiny_llama)),
            SchedulingConfig(),
            ExecutionConfig(cpu_threads=torch.get_num_threads(), **execution),  # type: ignore[arg-type]
        )


def test_what_a_cuda_device_computes_in() -> None:
    def mode(dtype: str) -> str:
        return choose_mode(ExecutionConfig(dtype=dtype), "cuda", "model", 16)  # type: ignore[arg-type]

    assert [mode(asked) for asked in ("auto", "float16", "float32")] == [
        "bfloat16",
        "float16",
        "float32",
    ]
    for asked in ("int4", "int8"):
        with pytest.raises(ModelError, match=f"--dtype {asked} is for the CPU"):
            mode(asked)
    assert choose_kv_dtype("auto", "cuda", "float16") is torch.float16
    assert choose_kv_dtype("fp8_e5m2", "cuda", "bfloat16") is torch.float8_e5m2
    with pytest.raises(ModelError, match="int8 is for the int8 and int4 modes"):
        choose_kv_dtype("int8", "cuda", "bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_packed_weights_are_not_shared_out_over_ranks(dtype: str, tiny_llama: Path) -> None:
    execution = ExecutionConfig(device="cpu", dtype=dtype, tensor_parallel=2)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"--tp 2 does not share out int. weights .* float32"):
        make_model_runner(
            ModelConfig(model=str(tiny_llama)), SchedulingConfig(), execution, shard=Shard(0, 2)
        )
