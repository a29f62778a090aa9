"""Models other than the embedded one: a directory, a GGUF path, dummy weights."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from e2e.mode import DTYPE, NEAR_TIE
from e2e.oracle import Oracle, margins
from e2e.prompts import Prompt
from support.server import Server, running_server, started_server

from tokenloom.model_files.resolve import resolve_model

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", DTYPE, "--kv-tokens", "2048")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Path:
    """A random Qwen3 with the embedded model's tokenizer and template, in several shards."""
    path = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    oracle.tokenizer.save_pretrained(path)
    return path


def behind(path: Path, prompt: list[int], answer: list[int]) -> float:
    """Return the largest logit gap between an id of the answer and transformers' greedy id."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return float(margins(model, prompt, answer).max())


def test_hugging_face_directory(tiny: Path, oracle: Oracle) -> None:
    chat = Prompt("chat", chat=(("user", "Where is the lighthouse?"),))
    with running_server(*FLAGS, "--model", str(tiny)) as server:
        assert server.info()["served_model_name"] == tiny.name
        assert server.info()["context_length"] == 512
        ids = oracle.encode(chat)
        said = server.generate(ids, max_new_tokens=24)["output_ids"]
        assert len(said) == 24 or said[-1] == 2
        assert behind(tiny, ids, said) < NEAR_TIE
        answer = server.post(
            "/v1/chat/completions", messages=chat.messages, temperature=0, max_tokens=24
        )
        assert answer["usage"]["prompt_tokens"] == len(ids)
        shown = oracle.tokenizer.decode(said, skip_special_tokens=True)
        assert answer["choices"][0]["message"]["content"] == shown


def test_gguf_path_and_its_limits_by_flags() -> None:
    path = resolve_model(None, None)
    flags = ("--model", path, "--served-model-name", "mine", "--context-length", "64")
    with running_server(*FLAGS, *flags) as server:
        assert server.info()["served_model_name"] == "mine"
        assert "Paris" in server.generate("The capital of France is", max_new_tokens=8)["text"]
        refused(server, [5] * 64, "64")


def test_dummy_weights(tiny: Path, tmp_path: Path) -> None:
    """Config and tokenizer suffice; answers are meaningless but repeatable."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    with running_server(*FLAGS, "--model", str(tmp_path), "--load-format", "dummy") as server:
        first = server.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)["output_ids"]
        assert len(first) == 8
        again = server.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)["output_ids"]
        assert again == first


@pytest.mark.parametrize("missing", ["family", "tokenizer"])
def test_what_cannot_be_served_is_refused_by_name(missing: str, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    if missing == "family":
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with started_server(*FLAGS, "--model", str(tmp_path)) as server:
        assert server.end() == 1
        server.assert_nothing_lives()
        assert ("has no tokenizer.json" if missing == "tokenizer" else "Mixtral") in server.log
        assert "Traceback" not in server.log


def refused(server: Server, ids: list[int], limit: str) -> None:
    with pytest.raises(AssertionError, match=f"the context has {limit}"):
        server.generate(ids, max_new_tokens=1)
