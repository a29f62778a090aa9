"""Safetensors: heads tied or not, shards and stray files, and every error by the tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_model

Load = Callable[[Path], LlamaForCausalLM]
WEIGHTS = "model.safetensors"


def edit_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    """Sets or, with None, removes tensors; `__` in a keyword stands for a dot."""
    tensors = load_file(directory / WEIGHTS)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / WEIGHTS)


def head_of(directory: Path, kind: str) -> torch.Tensor | None:
    embedding = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    return {"identical": embedding, "different": embedding + 0.25}[kind]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "identical", "different"])
def test_tie_flag_against_head(
    tied: bool,
    head: str,
    checkpoint: Callable[..., Any],
    load: Load,
    agrees: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    reference = checkpoint(transformers.LlamaConfig, tie_word_embeddings=tied)
    if head == "absent":
        if not tied:
            edit_weights(tmp_path, lm_head__weight=None)
            with pytest.raises(ModelError, match=r"lack tensors: lm_head\.weight"):
                load(tmp_path)
            return
    else:
        tensor = head_of(tmp_path, head)
        assert tensor is not None
        edit_weights(tmp_path, lm_head__weight=tensor)
        if tied and head == "different":
            with pytest.raises(ModelError, match=r"tie_word_embeddings.*different lm_head"):
                load(tmp_path)
            return
        if not tied:
            reference.lm_head.weight.data.copy_(tensor)
    agrees(reference, tmp_path)


def shard(directory: Path) -> list[str]:
    """Cuts model.safetensors in two with an index; returns the names in the first half."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / WEIGHTS).unlink()
    return names[: len(names) // 2]


def test_the_index_decides_which_files_count(
    checkpoint: Callable[..., Any],
    agrees: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    """A consolidated copy with other values and a stray file lie beside the shards."""
    reference = checkpoint(transformers.LlamaConfig)
    wrong = {name: tensor + 1 for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    shard(tmp_path)
    save_file(wrong, tmp_path / "consolidated.safetensors")
    save_file({"unrelated": torch.zeros(2)}, tmp_path / "stray.safetensors")
    agrees(reference, tmp_path)


def test_without_an_index_every_file_counts(
    checkpoint: Callable[..., Any], load: Load, tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is both in .* and in other"):
        load(tmp_path)


def test_a_shard_that_disagrees_with_the_index(
    checkpoint: Callable[..., Any], load: Load, tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    first = shard(tmp_path)[0]
    index = tmp_path / f"{WEIGHTS}.index.json"
    listed = json.loads(index.read_text())["weight_map"]

    def rewrite(**changes: str) -> None:
        index.write_text(json.dumps({"weight_map": listed | changes}))

    rewrite(**{first: "model-00002-of-00002.safetensors"})
    with pytest.raises(ModelError, match=f"{first} is in model-00002"):
        load(tmp_path)
    rewrite(ghost="model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="ghost is in model-00002"):
        load(tmp_path)
    rewrite(**{first: "../elsewhere.safetensors"})
    with pytest.raises(ModelError, match="elsewhere"):
        load(tmp_path)
    rewrite(**{first: "model-00003-of-00002.safetensors"})
    with pytest.raises(ModelError, match=r"cannot read .*model-00003"):
        load(tmp_path)
    del listed[first]
    rewrite()
    with pytest.raises(ModelError, match=f"does not list {first}"):
        load(tmp_path)


def test_tensors_are_used_filled_or_named(
    checkpoint: Callable[..., Any], load: Load, tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    edit_weights(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    load(tmp_path)  # an old buffer, known not to be a parameter
    edit_weights(tmp_path, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(ModelError, match=r"not used: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)
    edit_weights(tmp_path, model__layers__0__self_attn__q_proj__bias=None)
    edit_weights(tmp_path, model__norm__weight=torch.zeros(63))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        load(tmp_path)
    edit_weights(tmp_path, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is of type torch\.int8"):
        load(tmp_path)
    edit_weights(tmp_path, model__norm__weight=None)
    with pytest.raises(ModelError, match=r"lack tensors: model\.norm\.weight"):
        load(tmp_path)


def test_unreadable_and_absent_files(
    checkpoint: Callable[..., Any], load: Load, tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no \.safetensors files"):
        load(tmp_path)


def test_dummy_weights_need_a_config_alone(
    checkpoint: Callable[..., Any],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    checkpoint(transformers.Qwen3Config, num_hidden_layers=12)
    (tmp_path / WEIGHTS).unlink()
    logits = []
    for _ in range(2):
        model = load_model(
            str(tmp_path),
            dtype=torch.float32,
            device="cpu",
            load_format="dummy",
            context_length=None,
        )
        logits.append(model.forward(kv_pool(model.spec).batch({"a": prompt})))
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0
    torch.testing.assert_close(logits[0], logits[1], atol=0, rtol=0)
