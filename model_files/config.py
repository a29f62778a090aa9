"""Reader of a model's config, from config.json or GGUF metadata, without torch.

`read_config` uses the keys of config.json for both formats. Called by models/loader.py, which
decides what can be run. Tensors, tokenizers and that decision must not enter.
"""

import math
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader

from .errors import ModelError, names_the_file
from .gguf_file import integer, metadata, open_gguf, text
from .json_file import read_json_object

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Keys that do not change the forward pass, or are checked elsewhere.
_GGUF_HARMLESS = {
    "vocab_size",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "attention.value_length",
    "rope.dimension_count",
    "attention.layer_norm_epsilon",
    "expert_count",
    "expert_used_count",
}


@names_the_file
def read_config(path: str) -> dict[str, Any]:
    """Read the config of a directory or .gguf file under config.json keys. Raises ModelError."""
    if path.endswith(".gguf"):
        return _gguf_config(open_gguf(path))
    return read_json_object(Path(path) / "config.json", required=True)


# GGUF from here on; keys are from the format's specification (ggml-org/ggml, docs/gguf.md).


def _gguf_config(reader: GGUFReader) -> dict[str, Any]:
    meta = metadata(reader)
    arch = text(meta, "general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {arch!r} is not supported (known: {known})")
    if (integer(meta, "split.count") or 1) > 1:
        raise ModelError("this GGUF file is one piece of a split model; merge the pieces first")
    prefix = f"{arch}."
    keys = {k.removeprefix(prefix): v for k, v in meta.items() if k.startswith(prefix)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    config = _gguf_shape(keys, arch) | {
        "architectures": [GGUF_ARCHITECTURES[arch]],
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        "rope_parameters": _gguf_rope(keys, arch),
    }
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.tensor_type != GGMLQuantizationType.F32:
            kind = factors.tensor_type.name
            raise ModelError(f"rope_freqs.weight has type {kind}, which is not supported: F32 is")
        _use_frequency_factors(config["rope_parameters"], factors.data.tolist())
    left = sorted(keys.keys() - _GGUF_HARMLESS)
    if left:
        names = ", ".join(prefix + key for key in left)
        raise ModelError(f"these keys of the GGUF file are not supported: {names}")
    return config


def _gguf_shape(keys: dict[str, Any], arch: str) -> dict[str, Any]:
    """Pop the shape keys from `keys`. Raises ModelError for unsupported values."""
    if keys.get("expert_count"):
        raise ModelError(f"{arch}.expert_count: mixture-of-experts models are not supported")
    hidden = _size(keys, "embedding_length", arch)
    heads = _size(keys, "attention.head_count", arch)
    head_dim = _size(keys, "attention.key_length", arch, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ModelError(f"{arch}.{key} {keys[key]} differs from the head size {head_dim}")
    window = keys.pop("attention.sliding_window", 0)
    if type(window) is not int:
        raise ModelError(f"{arch}.attention.sliding_window must be an integer, got {window!r:.80}")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(keys, "attention.head_count_kv", arch, heads),
        "head_dim": head_dim,
        "num_hidden_layers": _size(keys, "block_count", arch),
        "intermediate_size": _size(keys, "feed_forward_length", arch),
        "max_position_embeddings": _size(keys, "context_length", arch),
        "rms_norm_eps": _number(keys, "attention.layer_norm_rms_epsilon", arch),
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def _size(keys: dict[str, Any], key: str, arch: str, default: int | None = None) -> int:
    value = _take(keys, key, arch, default)
    if type(value) is not int or value < 1:
        raise ModelError(f"{arch}.{key} must be a positive integer, got {value!r:.80}")
    return value


def _number(keys: dict[str, Any], key: str, arch: str, default: float | None = None) -> float:
    value = _take(keys, key, arch, default)
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise ModelError(f"{arch}.{key} must be a positive number, got {value!r:.80}")
    return float(value)


def _take(keys: dict[str, Any], key: str, arch: str, default: float | None) -> Any:  # noqa: ANN401
    if key not in keys and default is None:
        raise ModelError(f"the GGUF file lacks the key {arch}.{key}")
    return keys.pop(key, default)


_GGUF_ROPE = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _gguf_rope(keys: dict[str, Any], arch: str) -> dict[str, Any]:
    scaling = {
        name: _number(keys, f"rope.scaling.{key}", arch)
        for key, name in _GGUF_ROPE.items()
        if f"rope.scaling.{key}" in keys
    }
    legacy = _number(keys, "rope.scale_linear", arch, 1.0)
    if legacy != 1.0:
        scaling["factor"] = legacy
    # A factor without a type means linear.
    kind = keys.pop("rope.scaling.type", "linear" if scaling.get("factor", 1.0) > 1.0 else "none")
    rope = {"rope_theta": _number(keys, "rope.freq_base", arch, 10000.0)}
    scale = _number(keys, "rope.scaling.attn_factor", arch, 1.0)
    if kind == "yarn":
        # llama.cpp multiplies the paper's own factor by this one.
        factor = scale * (1.0 + 0.1 * math.log(max(scaling.get("factor", 1.0), 1.0)))
        return rope | scaling | {"rope_type": "yarn", "attention_factor": factor}
    if scale != 1.0:
        raise ModelError(f"rope.scaling.attn_factor {scale} with {kind} scaling is not supported")
    if kind == "none":
        return rope | {"rope_type": "default"}
    return rope | {"rope_type": kind, "factor": scaling.get("factor", 1.0)}


def _use_frequency_factors(rope: dict[str, Any], factors: list[float]) -> None:
    """Use the frequency divisors in the file, which is how converters write llama3 scaling."""
    if rope["rope_type"] != "default":
        raise ModelError(f"rope_freqs.weight beside {rope['rope_type']} scaling is not supported")
    rope |= {"rope_type": "freq_factors", "factors": factors}
