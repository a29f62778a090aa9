"""What a model's files say about its shape and its end tokens, as plain values, without torch.

`read_config` speaks config.json's language whatever the file format; the scheduler parses its
answer and decides what it can run. Tensors, tokenizers and that decision do not belong here.
"""

import math
from pathlib import Path
from typing import Any

import orjson
from gguf import GGUFReader

from .errors import ModelError
from .gguf_file import metadata, open_gguf

GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Facts that change nothing in the forward pass.
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


def read_config(path: str) -> dict[str, Any]:
    """The config of a directory or .gguf file in the words of config.json. Raises ModelError."""
    if path.endswith(".gguf"):
        return _gguf_config(open_gguf(path))
    return _read_json(Path(path) / "config.json")


def read_eos_token_ids(path: str) -> tuple[int, ...]:
    """Every id that any of the model's files calls an end of text or turn, ascending."""
    if path.endswith(".gguf"):
        meta = metadata(open_gguf(path))
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [meta.get(f"tokenizer.ggml.{key}") for key in keys]
        return tuple(sorted({int(value) for value in found if value is not None}))
    directory = Path(path)
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            ids.update(_id_list(_read_json(directory / name).get("eos_token_id"), name))
    return tuple(sorted(ids | _tokenizer_eos(directory)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _id_list(value: Any, where: str) -> list[int]:  # noqa: ANN401  (any JSON value)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or item < 0:
            raise ModelError(f"{where}: eos_token_id must be ids, got {value!r}")
    return values


def _tokenizer_eos(directory: Path) -> set[int]:
    """The id of the eos token that tokenizer_config.json names as a string."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return set()
    config = _read_json(path)
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return set()
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if token.get("content") == text:
            return {int(token_id)}
    vocabulary = directory / "tokenizer.json"
    token_id = _look_up(_read_json(vocabulary), text) if vocabulary.is_file() else None
    return set() if token_id is None else {token_id}


def _look_up(tokenizer: dict[str, Any], text: str) -> int | None:
    for token in tokenizer.get("added_tokens") or []:
        if token.get("content") == text:
            return int(token["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict):
        found = vocab.get(text)
        return None if found is None else int(found)
    # Unigram models list [piece, score] in the order of ids.
    pieces = [entry[0] for entry in vocab or []]
    return pieces.index(text) if text in pieces else None


# GGUF from here on: the keys are those of the format's specification (ggml-org/ggml, docs/gguf.md).


def _gguf_config(reader: GGUFReader) -> dict[str, Any]:
    meta = metadata(reader)
    arch = meta.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {arch!r} is not supported (known: {known})")
    if meta.get("split.count", 1) > 1:
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
        "rope_parameters": _gguf_rope(keys),
    }
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        _use_frequency_factors(config["rope_parameters"], factors.data.tolist())
    left = sorted(keys.keys() - _GGUF_HARMLESS)
    if left:
        names = ", ".join(prefix + key for key in left)
        raise ModelError(f"the GGUF file asks for what is not supported: {names}")
    return config


def _gguf_shape(keys: dict[str, Any], arch: str) -> dict[str, Any]:
    """Take the keys that give shapes out of `keys`; refuse what they cannot say here."""
    if keys.get("expert_count"):
        raise ModelError(f"{arch}.expert_count: mixture-of-experts models are not supported")
    hidden = _take(keys, "embedding_length", arch)
    heads = _take(keys, "attention.head_count", arch)
    head_dim = keys.pop("attention.key_length", None) or hidden // max(heads, 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ModelError(f"{arch}.{key} {keys[key]} differs from the head size {head_dim}")
    window = keys.pop("attention.sliding_window", 0)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.pop("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": _take(keys, "block_count", arch),
        "intermediate_size": _take(keys, "feed_forward_length", arch),
        "max_position_embeddings": _take(keys, "context_length", arch),
        "rms_norm_eps": _take(keys, "attention.layer_norm_rms_epsilon", arch),
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
    }


def _take(keys: dict[str, Any], key: str, arch: str) -> Any:  # noqa: ANN401  (checked by the spec)
    if key not in keys:
        raise ModelError(f"the GGUF file lacks the key {arch}.{key}")
    return keys.pop(key)


_GGUF_ROPE = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _gguf_rope(keys: dict[str, Any]) -> dict[str, Any]:
    found = {name: keys.pop(f"rope.scaling.{key}", None) for key, name in _GGUF_ROPE.items()}
    scaling = {name: value for name, value in found.items() if value is not None}
    legacy = keys.pop("rope.scale_linear", 1.0)
    if legacy != 1.0:
        scaling["factor"] = legacy
    # A factor without a type means linear.
    kind = keys.pop("rope.scaling.type", "linear" if scaling.get("factor", 1.0) > 1.0 else "none")
    rope = {"rope_theta": keys.pop("rope.freq_base", 10000.0)}
    scale = keys.pop("rope.scaling.attn_factor", 1.0)
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
    """The file holds finished divisors of the frequencies: how converters write llama3 scaling."""
    if rope["rope_type"] != "default":
        raise ModelError(f"rope_freqs.weight beside {rope['rope_type']} scaling is not supported")
    rope |= {"rope_type": "freq_factors", "factors": factors}
