"""Adapters in the torch path agree with peft in float32 within 1e-4, alone and in any crowd."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from models.test_gguf import new_writer, write_model
from models.test_packed import PackedPool
from support.peft_adapters import EVERY_MODULE, save_adapter

from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_model
from tokenloom.scheduler_proc.models.lora import LoRAAdapter, LoRAModule, group_rows
from tokenloom.scheduler_proc.models.packed import PackedLlama
from tokenloom.scheduler_proc.runner.lora_loader import load_adapter

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
MAX_RANK = 64

# Grouped queries; biases beside them; norms of queries and keys.
FAMILIES: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "every_module": {"target_modules": EVERY_MODULE},
    "rank_1": {"target_modules": EVERY_MODULE, "r": 1},
    "all_linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.\d\.self_attn\.[qk]_proj|model\.embed.*"},
    "whole_names": {"target_modules": ["model.layers.1.mlp.down_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "alpha": {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 3},
    "rslora": {"target_modules": EVERY_MODULE, "use_rslora": True},
    "rank_pattern": {
        "target_modules": EVERY_MODULE,
        "rank_pattern": {r"1\.self_attn\.q_proj": 3, "q_proj": 16, r".*\.0\.mlp\..*": 5},
    },
    "alpha_pattern": {
        "target_modules": EVERY_MODULE,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 2, "embed_tokens": 6},
        "alpha_pattern": {"v_proj": 5, "layers.0.mlp.up_proj": 1, "embed_tokens": 2},
    },
    "a_layer": {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": 1},
    # Whole names stand outside the rule of layers, other names without a layer fall to it.
    "layers": {
        "target_modules": ["o_proj", "k_proj", "lm_head", "embed_tokens"],
        "layers_to_transform": [0],
    },
    "layers_pattern": {
        "target_modules": ["v_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks", "layers"],
    },
    "exclude": {"target_modules": EVERY_MODULE, "exclude_modules": ["0.mlp.up_proj", "lm_head"]},
    "exclude_regex": {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
}

Checkpoint = Callable[..., transformers.PreTrainedModel]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_peft(
    family: str,
    tied: bool,
    checkpoint: Checkpoint,
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    """Every option, the prompt whole."""
    base = checkpoint(FAMILIES[family], head_dim=16, tie_word_embeddings=tied)
    model = load(tmp_path)
    plain = oracle(base, prompt)
    for option, fields in OPTIONS.items():
        reference = save_adapter(base, tmp_path / option, **fields)
        adapter = load_adapter(Path(option), model.spec, [tmp_path], MAX_RANK)
        batch = kv_pool(model.spec).batch({"a": prompt})
        expected = oracle(reference, prompt)
        assert (expected - plain).abs().max() > 0.05, option
        logits = model.forward(replace(batch, adapters=[adapter]))
        torch.testing.assert_close(
            logits, expected, **TOLERANCE, msg=lambda text, option=option: f"{option}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_of_ranks_equals_its_members_alone(
    family: str,
    checkpoint: Checkpoint,
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    """One base request and seven adapters; two requests share one; extends and decodes together."""
    base = checkpoint(FAMILIES[family], head_dim=16)
    model = load(tmp_path)
    ranks = [1, 4, 8, 16, 64, 8, 1]
    targets = [EVERY_MODULE, ["q_proj"], ["embed_tokens", "down_proj"], "all-linear"]
    references = [base]
    adapters: list[LoRAAdapter | None] = [None]
    for index, rank in enumerate(ranks):
        path = tmp_path / str(index)
        chosen = targets[index % len(targets)]
        references.append(save_adapter(base, path, seed=index, r=rank, target_modules=chosen))
        adapters.append(load_adapter(path, model.spec, [tmp_path], MAX_RANK))
    members = [3, 0, 7, 1, 2, 3, 5, 4, 6]
    prompts = {str(row): prompt[row : row + 6 + row] for row in range(len(members))}
    of_rows = [adapters[member] for member in members]

    pool = kv_pool(model.spec)
    early = {row: ids[:-1] for row, ids in prompts.items() if int(row) % 2}
    taken = [of_rows[int(row)] for row in early]
    model.forward(replace(pool.batch(early, logits=[]), adapters=taken))
    late = {row: ids[-1:] if int(row) % 2 else ids for row, ids in prompts.items()}
    ends = torch.tensor([len(ids) for ids in late.values()]).cumsum(0) - 1
    logits = model.forward(replace(pool.batch(late, logits=ends.tolist()), adapters=of_rows))

    for row, (member, ids) in enumerate(zip(members, prompts.values(), strict=True)):
        alone = replace(kv_pool(model.spec).batch({"a": ids}), adapters=[adapters[member]])
        torch.testing.assert_close(logits[row], model.forward(alone)[-1], **TOLERANCE)
        torch.testing.assert_close(logits[row], oracle(references[member], ids)[-1], **TOLERANCE)


def test_greedy_ids_equal_peft(
    checkpoint: Checkpoint,
    load: Callable[[Path], LlamaForCausalLM],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    base = checkpoint(transformers.LlamaConfig)
    reference = save_adapter(base, tmp_path / "a", target_modules=EVERY_MODULE)
    model = load(tmp_path)
    adapters = [load_adapter(tmp_path / "a", model.spec, [tmp_path], MAX_RANK)]
    pool = kv_pool(model.spec)
    ids, new = list(prompt), list(prompt)
    for _ in range(16):
        logits = model.forward(replace(pool.batch({"a": new}), adapters=adapters))
        new = [int(logits[-1].argmax())]
        ids += new
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert ids == out[0].tolist()


def test_a_gguf_file_takes_adapters_as_they_are(
    checkpoint: Checkpoint,
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    """Queries and keys lie in another order in the file; the adapter's are those of peft."""
    base = checkpoint(transformers.LlamaConfig)
    path = tmp_path / "model.gguf"
    write_model(new_writer(path, base, "llama"), base, "llama", GGMLQuantizationType.F32)
    reference = save_adapter(base, tmp_path / "a", target_modules=["q_proj", "k_proj"])
    model = load(path)
    adapter = load_adapter(Path("a"), model.spec, [tmp_path], MAX_RANK)
    logits = model.forward(replace(kv_pool(model.spec).batch({"a": prompt}), adapters=[adapter]))
    torch.testing.assert_close(logits, oracle(reference, prompt), **TOLERANCE)


def test_bfloat16_stays_near_float32(
    checkpoint: Checkpoint, kv_pool: Callable[..., Any], prompt: list[int], tmp_path: Path
) -> None:
    base = checkpoint(transformers.LlamaConfig, initializer_range=0.05)
    save_adapter(base, tmp_path / "a", target_modules=EVERY_MODULE)
    logits, plain = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(
            str(tmp_path), dtype=dtype, device="cpu", load_format="auto", context_length=64
        )
        adapter = load_adapter(tmp_path / "a", model.spec, [tmp_path], MAX_RANK)
        batch = kv_pool(model.spec).batch({"a": prompt})
        caches = {
            "k_cache": [k.to(dtype) for k in batch.k_cache],
            "v_cache": [v.to(dtype) for v in batch.v_cache],
        }
        plain[dtype] = model.forward(replace(batch, **caches))
        logits[dtype] = model.forward(replace(batch, **caches, adapters=[adapter]))
    difference = (logits[torch.bfloat16] - logits[torch.float32]).abs().mean()
    assert difference < 0.02 * (logits[torch.float32] - plain[torch.float32]).abs().mean()


def test_packed_models_take_the_same_files(
    checkpoint: Checkpoint,
    load_packed: Callable[..., PackedLlama],
    oracle: Callable[..., torch.Tensor],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    base = checkpoint(transformers.LlamaConfig, initializer_range=0.08)
    reference = save_adapter(base, tmp_path / "a", target_modules=EVERY_MODULE, use_rslora=True)
    model = load_packed("int8")
    adapter = model.resident(load_adapter(Path("a"), model.spec, [tmp_path], MAX_RANK))
    logits = PackedPool(model).run({"a": prompt}, adapters={"a": adapter})[0]
    expected = oracle(reference, prompt)[-1]
    assert torch.cosine_similarity(logits, expected, dim=0) > 0.998
    assert torch.cosine_similarity(oracle(base, prompt)[-1], expected, dim=0) < 0.9


def test_rows_are_grouped_by_adapter() -> None:
    one, other = (LoRAAdapter({}, 1) for _ in range(2))
    groups = group_rows([one, None, other, one], [2, 3, 1, 2])
    assert [(adapter, rows.tolist()) for adapter, rows in groups] == [
        (one, [0, 1, 6, 7]),
        (other, [5]),
    ]
    assert group_rows([], [4, 1]) == []
    assert group_rows([None, None], [4, 1]) == []


def test_bytes_are_those_of_the_tensors() -> None:
    module = LoRAModule(torch.zeros(4, 10), torch.zeros(6, 4))
    assert LoRAAdapter({(0, "q"): module, (1, "q"): module}, 4).num_bytes == 2 * 64 * 4
