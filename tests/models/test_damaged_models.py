"""Models whose config or files are damaged: refused by file and key, and nothing is allocated."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models import loader
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.weights import SafetensorsCheckpoint

Load = Callable[[Path], LlamaForCausalLM]
WEIGHTS = "model.safetensors"
HUGE = 1 << 31


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices on which models were made; one of shapes alone does not count."""
    made: list[str] = []

    def make(spec: Any, dtype: torch.dtype, device: str, *rest: Any) -> LlamaForCausalLM:  # noqa: ANN401
        if device != "meta":
            made.append(device)
        return LlamaForCausalLM(spec, dtype, device, *rest)

    monkeypatch.setattr(loader, "MODELS", {"LlamaForCausalLM": make})
    return made


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": 2}, "architecture 2 is not supported"),
        ({"architectures": {}}, "architecture None is not supported"),
        ({"architectures": [[]]}, r"architecture \[\] is not supported"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"num_hidden_layers": 1e308}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"num_hidden_layers": 1000}, "lack tensors"),
        ({"hidden_size": HUGE}, "hidden_size must be an integer"),
        ({"hidden_size": 65536}, "has shape .* the config asks for"),
        ({"intermediate_size": 1 << 20}, "has shape .* the config asks for"),
        ({"vocab_size": HUGE}, "vocab_size must be an integer"),
        ({"vocab_size": 1 << 24}, r"embed_tokens\.weight has shape \[97, 64\]"),
        ({"head_dim": HUGE}, "head_dim must be an integer"),
        ({"max_position_embeddings": 1 << 62}, "max_position_embeddings must be an integer"),
        ({"num_attention_heads": -1}, "num_attention_heads must be an integer"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window must be an integer"),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"rope_parameters": 3}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "freq_factors"}}, "frequency factors must be a list"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
            "rope_theta must differ from 1",
        ),
    ],
)
def test_a_wrong_config_is_refused_before_anything_is_allocated(
    fields: dict[str, object],
    words: str,
    checkpoint: Callable[..., Any],
    edit_config: Callable[..., None],
    load: Load,
    allocated: list[str],
    tmp_path: Path,
) -> None:
    checkpoint(transformers.LlamaConfig)
    edit_config(**fields)
    with pytest.raises(ModelError, match=words) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert not allocated


def test_an_undamaged_model_is_allocated_once(
    checkpoint: Callable[..., Any], load: Load, allocated: list[str], tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    load(tmp_path)
    assert allocated == ["cpu"]


def test_weights_that_are_a_pointer_or_cut(
    checkpoint: Callable[..., Any], load: Load, allocated: list[str], tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    file = tmp_path / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is a Git LFS pointer"):
        load(tmp_path)
    assert not allocated


@pytest.mark.parametrize("told", ["right", "wrong", "text", "nothing"])
def test_a_wrong_total_size_is_a_warning(
    told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    index: dict[str, Any] = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    if told != "nothing":
        index["metadata"] = {"total_size": {"right": size, "wrong": size + 1, "text": "x"}[told]}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        assert shapes(tmp_path) == {"a": [3, 5], "b": [7]}
    said = [record.getMessage() for record in caplog.records]
    if told in ("right", "nothing"):
        assert not said
    else:
        (line,) = said
        assert f"hold {size} bytes" in line
        assert "index.json says total_size" in line


def shapes(directory: Path) -> dict[str, list[int]]:
    checkpoint = SafetensorsCheckpoint(directory, tied=False)
    return {name: checkpoint.shape(name) for name in checkpoint.names}


def test_one_file_and_its_bytes(checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    """The shapes in a file's header are those of its tensors."""
    checkpoint(transformers.LlamaConfig)
    tensors = load_file(tmp_path / WEIGHTS)
    assert shapes(tmp_path) == {name: list(t.shape) for name, t in tensors.items()}
