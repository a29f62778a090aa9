"""Adapters through the whole server: answers equal to peft's, batch invariance, loads under
traffic.

Adapters are random and change nearly every answer, so that a wrong one shows at once.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.mode import DTYPE, NEAR_TIE
from e2e.oracle import Oracle, margins
from e2e.prompts import TIMEOUTS
from peft import PeftModel
from support.server import Server, running_server

from tokenloom.bench.random_adapters import write_adapter
from tokenloom.client import Client
from tokenloom.client.errors import RequestRefused

pytestmark = pytest.mark.slow

RANKS = {"a": 4, "b": 8, "c": 16}
Ask = tuple[str | None, list[int]]  # adapter, prompt


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(root / name, seed, rank)
    write_adapter(root / "query", 7, 8, modules=("self_attn.q_proj",))
    write_adapter(root / "high", 8, 32, modules=("self_attn.q_proj",))
    write_adapter(root / "broken", 9)
    weights = root / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    write_adapter(root.parent / "outside", 10)
    return root


def flags(root: Path) -> list[str]:
    loras = [word for name in RANKS for word in ("--lora", f"{name}={root / name}")]
    return [*loras, "--lora-root", str(root), "--max-lora-rank", "16"]


@pytest.fixture(scope="module")
def _packed(root: Path) -> Iterator[Server]:
    small = ["--kv-tokens", "384", "--max-running-requests", "8", "--max-loras-per-batch", "2"]
    with running_server("--dtype", "int4", *small, *flags(root)) as server:
        yield server


@pytest.fixture
def packed(_packed: Server) -> Iterator[Server]:
    """Server in a packed mode; after each test it must be idle, with the initial adapters."""
    yield _packed
    _packed.wait_until_idle()
    with Client(_packed.door, timeout=TIMEOUTS) as client:
        assert client.loras() == list(RANKS)
    assert "Traceback" not in _packed.log


def answer(server: Server, ask: Ask, max_new: int, **fields: object) -> list[int]:
    sampling = {"temperature": 0.0, "max_new_tokens": max_new, "ignore_eos": True}
    said = server.post(
        "/generate", input_ids=ask[1], lora_path=ask[0], sampling_params=sampling, **fields
    )
    ids: list[int] = said["output_ids"]
    return ids


def together(server: Server, asks: Sequence[Ask], max_new: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: answer(server, ask, max_new), asks))


def crowd(prompts: int) -> list[Ask]:
    texts = [[(seed * 71 + i * i * 13) % 40_000 + 3 for i in range(24)] for seed in range(prompts)]
    return [(name, text) for text, name in itertools.product(texts, (None, *RANKS))]


def adapted(oracle: Oracle, root: Path) -> PeftModel:
    first, *others = RANKS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge = PeftModel.from_pretrained(
            copy.deepcopy(oracle._model), root / first, adapter_name=first
        ).eval()
        for name in others:
            judge.load_adapter(root / name, adapter_name=name)
    return judge


def test_greedy_ids_of_a_crowd_are_those_of_peft(root: Path, oracle: Oracle) -> None:
    """Four variants in one step, of three ranks, with the same prefix."""
    prompts = 2
    asks = crowd(prompts)
    with running_server("--dtype", DTYPE, "--kv-tokens", "4096", *flags(root)) as server:
        said = together(server, asks, 8)
        server.wait_until_idle()
    judge = adapted(oracle, root)
    for (name, prompt), ids in zip(asks, said, strict=True):
        if name is None:
            with judge.disable_adapter():
                behind = margins(judge, prompt, ids)
        else:
            judge.set_adapter(name)
            behind = margins(judge, prompt, ids)
        assert behind.max() < NEAR_TIE, (name, prompt[:3])
    assert len({tuple(ids) for ids in said}) > prompts, "adapters change answers"


def test_answers_out_of_a_crowd_equal_those_alone(packed: Server) -> None:
    """Equal bit for bit, though two slots serve three adapters and the pool overflows."""
    asks = crowd(5)
    for place, (ask, ids) in enumerate(zip(asks, together(packed, asks, 24), strict=True)):
        assert ids == answer(packed, ask, 24, cache_salt=f"alone {place}"), (place, ask[0])


def test_a_cached_prefix_is_of_use_under_its_own_adapter(packed: Server) -> None:
    prompt = [(i * i * 17) % 40_000 + 3 for i in range(64)]
    sampling = {"temperature": 0.0, "max_new_tokens": 2}
    for asked_again in (False, True):
        for name in (None, *RANKS):
            said = packed.post(
                "/generate", input_ids=prompt, lora_path=name, sampling_params=sampling
            )
            assert bool(said["meta_info"]["cached_tokens"]) == asked_again, name


PROMPT = [(i * i * 29) % 40_000 + 3 for i in range(12)]
LONG = 48


def test_answers_end_on_the_weights_that_they_began_with(packed: Server) -> None:
    """Running streams keep their weights while their adapter is replaced twice and unloaded."""
    url = packed.url
    with Client(packed.door, timeout=TIMEOUTS) as client:
        alone = {}
        for version in ("a", "b", "query"):
            client.load_lora("x", version)
            alone[version] = answer(packed, ("x", PROMPT), LONG, cache_salt=f"alone {version}")
        assert len({tuple(ids) for ids in alone.values()}) == 3

        def begin() -> tuple[Any, Any]:
            stream = client.generate(
                input_ids=PROMPT, lora_path="x", max_new_tokens=LONG, ignore_eos=True, temperature=0
            )
            deltas = iter(stream)
            next(deltas)
            return stream, deltas

        streams = {}
        client.load_lora("x", "a")
        streams["a"] = begin()
        packed.post("/load_lora_adapter", lora_name="x", lora_path="b")
        streams["b"] = begin()
        client.load_lora("x", "query")
        streams["query"] = begin()
        packed.post("/unload_lora_adapter", lora_name="x")
        late = packed.http.post(f"{url}/generate", json={"input_ids": PROMPT, "lora_path": "x"})
        assert late.status_code == 404
        with pytest.raises(RequestRefused):
            client.complete(input_ids=PROMPT, lora_path="x")
        for version, (stream, deltas) in streams.items():
            list(deltas)
            assert stream.token_ids == alone[version], version
        client.load_lora("x", "a")
        assert answer(packed, ("x", PROMPT), LONG) == alone["a"]
        client.unload_lora("x")


def test_a_reload_gives_the_same_weights(packed: Server) -> None:
    """With fewer slots than adapters, each is evicted from its slot and reloaded."""
    with Client(packed.door, timeout=TIMEOUTS) as client:
        before = {name: answer(packed, (name, PROMPT), 16) for name in RANKS}
        for _ in range(3):
            for name in RANKS:
                client.load_lora(name, name)
                assert answer(packed, (name, PROMPT), 16) == before[name]


WRONG_LOADS = [
    ("x", "outside", 404, "no directory"),
    ("x", "../outside", 400, "--lora-root"),
    ("x", "/etc", 400, "--lora-root"),
    ("x", "broken", 400, "safetensors"),
    ("x", "high", 400, "rank"),
    ("x", "", 400, "lora_path"),
    ("", "a", 400, "lora_name"),
    ("a/b", "a", 400, "lora_name"),
    ("SmolLM2-135M-Instruct", "a", 400, "base model"),
]


@pytest.mark.parametrize(("name", "path", "status", "words"), WRONG_LOADS)
def test_wrong_loads(packed: Server, name: str, path: str, status: int, words: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    said = packed.http.post(f"{packed.url}/load_lora_adapter", json=body)
    assert said.status_code == status, said.text
    assert words in said.text
    with Client(packed.door, timeout=TIMEOUTS) as client, pytest.raises(RequestRefused) as refused:
        client.load_lora(name, path)
    assert refused.value.status == status
    assert answer(packed, ("a", PROMPT), 2), "others are served"


def test_unknown_names(packed: Server) -> None:
    for route, body in (
        ("/generate", {"input_ids": PROMPT, "lora_path": "nobody"}),
        ("/v1/completions", {"prompt": "a", "model": "nobody"}),
        ("/unload_lora_adapter", {"lora_name": "nobody"}),
    ):
        said = packed.http.post(f"{packed.url}{route}", json=body)
        assert said.status_code == 404, said.text
        assert "nobody" in said.text
