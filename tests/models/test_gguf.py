"""GGUF: files written as llama.cpp's converter does load into the same model; refusals by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from tokenloom.model_files.config import read_config
from tokenloom.model_files.end_tokens import read_end_tokens
from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.config import parse_spec
from tokenloom.scheduler_proc.models.gguf_weights import _values
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM

Load = Callable[[Path], LlamaForCausalLM]
Agrees = Callable[..., LlamaForCausalLM]
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_metadata(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(3)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering of q and k rows for ggml's rotary embedding."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def new_writer(path: Path, model: transformers.PreTrainedModel, arch: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, model.config)
    return writer


def write_model(
    writer: gguf.GGUFWriter, model: transformers.PreTrainedModel, arch: str, kind: Kind
) -> None:
    """Matrices in `kind`, the rest in F32. `model` gets the rounded values: it is the oracle."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        as_kind = kind if values.ndim == 2 else Kind.F32
        module = name.split(".")[-2]
        if arch == "llama" and module in heads:
            values = permute(values, heads[module])
        data = quantize(np.ascontiguousarray(values), as_kind)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=as_kind
        )
        if as_kind is not Kind.F32:
            rounded = quantize(parameter.detach().numpy(), as_kind)
            parameter.data.copy_(torch.from_numpy(dequantize(rounded, as_kind)))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0])
@pytest.mark.parametrize("arch", CONFIGS)
def test_equals_transformers(
    arch: str,
    kind: Kind,
    tied: bool,
    checkpoint: Callable[..., Any],
    agrees: Agrees,
    tmp_path: Path,
) -> None:
    fields = {"intermediate_size": 96, "tie_word_embeddings": tied}
    model = checkpoint(CONFIGS[arch], **fields)
    path = tmp_path / "model.gguf"
    write_model(new_writer(path, model, arch), model, arch, kind)
    assert agrees(model, path).spec.tied == tied


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_small_quants_equal_transformers(
    kind: Kind,
    checkpoint: Callable[..., Any],
    agrees: Agrees,
    tmp_path: Path,
) -> None:
    model = checkpoint(transformers.LlamaConfig, intermediate_size=96, vocab_size=160)
    path = tmp_path / "model.gguf"
    write_model(new_writer(path, model, "llama"), model, "llama", kind)
    agrees(model, path)


def test_llama_biases_are_reordered_too(
    checkpoint: Callable[..., Any],
    agrees: Agrees,
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1}
    model = checkpoint(transformers.LlamaConfig, attention_bias=True, mlp_bias=True, **shape)
    path = tmp_path / "model.gguf"
    write_model(new_writer(path, model, "llama"), model, "llama", Kind.F32)
    agrees(model, path)


@pytest.mark.parametrize("rows", [1, 6, 64, 97])
@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]
)
def test_types_that_only_read(kind: Kind, rows: int, tmp_path: Path) -> None:
    """Random blocks, compared row by row: our joining of rows changes no value."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    width = 512
    # Bytes below 0x3c make every half-precision scale finite.
    generator = np.random.default_rng(0)
    data = generator.integers(0, 0x3C, (rows, width // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    finish(writer)
    (tensor,) = gguf.GGUFReader(tmp_path / "one.gguf").tensors
    expected = np.stack([dequantize(row[None], kind)[0] for row in data])
    np.testing.assert_array_equal(_values(tensor), expected)


SCALINGS: dict[str, tuple[Callable[[gguf.GGUFWriter], None], dict[str, Any]]] = {
    "linear": (
        lambda writer: (
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            writer.add_rope_scaling_factor(2.0),
        ),
        {"rope_type": "linear", "factor": 2.0},
    ),
    "linear, old key": (
        lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0),
        {"rope_type": "linear", "factor": 2.0},
    ),
    "factor without type": (
        lambda writer: writer.add_rope_scaling_factor(2.0),
        {"rope_type": "linear", "factor": 2.0},
    ),
    "none": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        {"rope_type": "default"},
    ),
    "yarn": (
        lambda writer: (
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            writer.add_rope_scaling_factor(4.0),
            writer.add_rope_scaling_orig_ctx_len(32),
            writer.add_rope_scaling_yarn_beta_fast(16.0),
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
        },
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_rope_scaling_keys(
    case: str,
    checkpoint: Callable[..., Any],
    agrees: Agrees,
    tmp_path: Path,
) -> None:
    add, rope = SCALINGS[case]
    model = checkpoint(transformers.LlamaConfig, rope_parameters=rope | {"rope_theta": 500.0})
    path = tmp_path / "model.gguf"
    writer = new_writer(path, model, "llama")
    add(writer)
    write_model(writer, model, "llama", Kind.F32)
    agrees(model, path)


def test_llama3_scaling_comes_as_frequency_factors(
    checkpoint: Callable[..., Any],
    agrees: Agrees,
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = checkpoint(transformers.LlamaConfig, rope_parameters=rope)
    plain = 1.0 / 500.0 ** (np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    path = tmp_path / "model.gguf"
    writer = new_writer(path, model, "llama")
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    write_model(writer, model, "llama", Kind.F32)
    agrees(model, path)


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "experts": (lambda writer: writer.add_expert_count(8), r"llama\.expert_count"),
    "window": (lambda writer: writer.add_sliding_window(16), "sliding_window 16"),
    "unknown key": (
        lambda writer: writer.add_float32("llama.logit_scale", 2.0),
        r"not supported: llama\.logit_scale",
    ),
    "longrope": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "'longrope'",
    ),
    "split": (lambda writer: writer.add_uint16("split.count", 2), "split"),
    "unknown tensor": (
        lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
        r"not used: blk\.0\.attn_sinks\.weight",
    ),
    "tensor of a layer too many": (
        lambda writer: writer.add_tensor("blk.2.attn_norm.weight", np.zeros(64, np.float32)),
        r"not used: model\.layers\.2\.input_layernorm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(
    case: str, checkpoint: Callable[..., Any], load: Load, tmp_path: Path
) -> None:
    add, named = REFUSED[case]
    model = checkpoint(transformers.LlamaConfig)
    path = tmp_path / "model.gguf"
    writer = new_writer(path, model, "llama")
    add(writer)
    write_model(writer, model, "llama", Kind.F32)
    with pytest.raises(ModelError, match=named):
        load(path)


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "a.gguf", "gemma2"))
    with pytest.raises(ModelError, match="'gemma2' is not supported"):
        read_config(str(tmp_path / "a.gguf"))


def test_end_tokens_and_sizes_come_from_the_file(
    checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    model = checkpoint(transformers.Qwen3Config, head_dim=32)
    path = tmp_path / "model.gguf"
    write_model(new_writer(path, model, "qwen3"), model, "qwen3", Kind.F32)
    assert read_end_tokens(str(path)).ids == (3, 5)
    spec = parse_spec(read_config(str(path)))
    assert (spec.vocab_size, spec.head_dim, spec.num_kv_heads) == (97, 32, 2)
    assert spec.qk_norm
    assert not spec.qkv_bias
