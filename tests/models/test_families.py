"""Every family x RoPE kind x head shape agrees with transformers in float32 within 1e-4."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_model

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama_bias": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3_bias": (transformers.Qwen3Config, {"attention_bias": True}),
}

# original_max_position_embeddings is short, so that the ramps fall inside the tested frequencies.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}

SHAPES: dict[str, dict[str, int]] = {
    "5_heads_of_12": {
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 12,
    },
    "head_dim_beside_hidden": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "6_over_3_of_10": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(
    family: str,
    scaling: str,
    shape: str,
    checkpoint: Callable[..., Any],
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    config_class, fields = FAMILIES[family]
    rope = SCALINGS[scaling] | {"rope_theta": 500.0}
    expected = oracle(
        checkpoint(config_class, rope_parameters=rope, **fields, **SHAPES[shape]), prompt
    )
    model = load(tmp_path)
    pool = kv_pool(model.spec)

    whole = model.forward(pool.batch({"whole": prompt}))
    torch.testing.assert_close(whole, expected, **TOLERANCE)

    pieces = [prompt[:7], prompt[7:8], prompt[8:18], *([token] for token in prompt[18:])]
    logits = [model.forward(pool.batch({"cut": piece})) for piece in pieces]
    torch.testing.assert_close(torch.cat(logits), expected, **TOLERANCE)


def test_the_scalings_differ_from_each_other(
    checkpoint: Callable[..., Any],
    load: Callable[[Path], LlamaForCausalLM],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    """Else the table above would prove nothing."""
    seen: list[torch.Tensor] = []
    for scaling in SCALINGS.values():
        checkpoint(transformers.LlamaConfig, rope_parameters=scaling | {"rope_theta": 500.0})
        model = load(tmp_path)
        seen.append(model.forward(kv_pool(model.spec).batch({"a": prompt})))
    for index, logits in enumerate(seen):
        for other in seen[:index]:
            assert (logits - other).abs().max() > 1e-2


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_spellings_of_scaling_are_one(
    scaling: str,
    key: str,
    checkpoint: Callable[..., Any],
    edit_config: Callable[..., None],
    agrees: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
) -> None:
    """The older layout: rope_scaling with type or rope_type, and rope_theta at the top."""
    fields = SCALINGS[scaling]
    reference = checkpoint(
        transformers.LlamaConfig, rope_parameters=fields | {"rope_theta": 500000.0}
    )
    old = {key: fields["rope_type"]} | {k: v for k, v in fields.items() if k != "rope_type"}
    edit_config(rope_parameters=..., rope_scaling=old, rope_theta=500000.0)
    agrees(reference, tmp_path)


def test_a_crowd_changes_nothing_for_its_members(
    checkpoint: Callable[..., Any],
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    """Decodes and extends of several requests in one step; only some rows are asked for."""
    reference = checkpoint(transformers.Qwen2Config)
    model = load(tmp_path)
    pool = kv_pool(model.spec)
    a, b, c = prompt, prompt[5:], prompt[:9]
    model.forward(pool.batch({"a": a[:-1], "b": b[:4]}, logits=[]))
    last_rows = [0, len(b) - 4, len(b) - 4 + len(c)]
    logits = model.forward(pool.batch({"a": a[-1:], "b": b[4:], "c": c}, logits=last_rows))
    assert logits.dtype == torch.float32
    expected = torch.stack([oracle(reference, ids)[-1] for ids in (a, b, c)])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_no_rows_asked_for_give_no_logits(
    checkpoint: Callable[..., Any],
    load: Callable[[Path], LlamaForCausalLM],
    kv_pool: Callable[..., Any],
    prompt: list[int],
    tmp_path: Path,
) -> None:
    checkpoint(transformers.LlamaConfig, vocab_size=2048)
    model = load(tmp_path)
    assert model.forward(kv_pool(model.spec).batch({"a": prompt}, logits=[])).shape == (0, 2048)


def test_bfloat16_stays_near_float32(
    checkpoint: Callable[..., Any], prompt: list[int], kv_pool: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig, initializer_range=0.05)
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(
            str(tmp_path), dtype=dtype, device="cpu", load_format="auto", context_length=64
        )
        batch = kv_pool(model.spec).batch({"a": prompt})
        caches = {
            "k_cache": [k.to(dtype) for k in batch.k_cache],
            "v_cache": [v.to(dtype) for v in batch.v_cache],
        }
        logits[dtype] = model.forward(replace(batch, **caches))
    torch.testing.assert_close(logits[torch.bfloat16], logits[torch.float32], atol=0.05, rtol=0.05)


def test_context_length_lowers_and_never_raises(
    checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig)

    def load_with(limit: int) -> LlamaForCausalLM:
        return load_model(
            str(tmp_path),
            dtype=torch.float32,
            device="cpu",
            load_format="dummy",
            context_length=limit,
        )

    assert load_with(64).spec.context_length == 64
    with pytest.raises(ModelError, match=r"129 is above the model's own 128"):
        load_with(129)
