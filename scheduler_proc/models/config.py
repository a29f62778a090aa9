"""ModelSpec: the shape of the decoder, parsed from a config.json-style dict.

Called by the loader. A config key that asks for something the decoder does not compute is refused
by name, so no key that changes the result is ignored. Tensors must not enter.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...model_files.errors import ModelError

Config = dict[str, Any]
RopeKind = Literal["default", "linear", "llama3", "yarn", "freq_factors"]


@dataclass(slots=True, frozen=True)
class RopeSpec:
    """Rotary embedding parameters. Each kind of scaling uses its own fields beside `theta`."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True
    factors: tuple[float, ...] = ()  # divisors of the frequencies, [head_dim // 2]


@dataclass(slots=True, frozen=True)
class ModelSpec:
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeSpec
    tied: bool  # the head uses the embedding's weights
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(slots=True, frozen=True)
class _Family:
    """Differences between an architecture's modelling code and Llama's."""

    attention_bias: Literal["config", "qkv", "none"] = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_by_default: bool = False  # default of use_sliding_window
    default_head_dim: int | None = None


FAMILIES = {
    "LlamaForCausalLM": _Family(attention_bias="config", mlp_bias=True),
    "MistralForCausalLM": _Family(sliding_by_default=True),
    "Qwen2ForCausalLM": _Family(attention_bias="qkv"),
    "Qwen3ForCausalLM": _Family(attention_bias="config", qk_norm=True, default_head_dim=128),
}

# Keys that change the computation in ways not supported: refused unless false or empty.
_UNSUPPORTED = {
    "quantization_config": "quantised safetensors",
    "compression_config": "quantised safetensors",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "moe_intermediate_size": "mixture of experts",
    "attn_logit_softcapping": "logit softcapping",
    "final_logit_softcapping": "logit softcapping",
    "no_rope_layers": "layers without rotary embedding",
    "attention_chunk_size": "chunked attention",
}
_NEUTRAL_AT_ONE = (
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "partial_rotary_factor",
    "rotary_pct",
)


# Above any known model: a damaged file must not cause huge loops or allocations.
_LARGEST = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 23,
    "original_max_position_embeddings": 1 << 23,
}


def parse_spec(config: Config) -> ModelSpec:
    """Parse a config. Raises ModelError naming the first missing, malformed or unsupported key."""
    listed = config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else listed or None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        raise ModelError(
            f"architecture {architecture!r} is not supported (known: {', '.join(FAMILIES)})"
        )
    _refuse_unsupported(config, family)
    context_length = _integer(config, "max_position_embeddings")
    attention_bias = _flag(config, "attention_bias")
    if attention_bias and family.attention_bias == "none":
        raise ModelError(f"attention_bias is not supported for {architecture}")
    if _flag(config, "mlp_bias") and not family.mlp_bias:
        raise ModelError(f"mlp_bias is not supported for {architecture}")
    with_bias = attention_bias and family.attention_bias == "config"
    hidden_size = _integer(config, "hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(config, hidden_size, family)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        context_length=context_length,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=parse_rope(config, context_length, head_dim),
        tied=_flag(config, "tie_word_embeddings"),
        qkv_bias=with_bias or family.attention_bias == "qkv",
        o_bias=with_bias,
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
    )


def _heads(config: Config, hidden_size: int, family: _Family) -> tuple[int, int, int]:
    """Return (query heads, KV heads, head size). Raises ModelError if they do not fit."""
    num_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None and family.default_head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = _integer(config, "head_dim", family.default_head_dim)
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    return num_heads, num_kv_heads, head_dim


def _refuse_unsupported(config: Config, family: _Family) -> None:
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(f"{key} {config[key]!r}: {what} is not supported")
    for key in _NEUTRAL_AT_ONE:
        if config.get(key) not in (None, 1, 1.0):
            raise ModelError(f"{key} {config[key]!r} is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported (known: silu)")
    _refuse_sliding_window(config, family)


def _refuse_sliding_window(config: Config, family: _Family) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ModelError(f"config: layer_types must be a list, got {layer_types!r:.80}")
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            raise ModelError(f"layer_types {', '.join(others)}: only full_attention is supported")
    used = _flag(config, "use_sliding_window", family.sliding_by_default)
    if config.get("sliding_window") is None or not used:
        return
    window = _integer(config, "sliding_window")
    # Layers below max_window_layers use full attention.
    first = _integer(config, "max_window_layers", 0, least=0)
    if first >= _integer(config, "num_hidden_layers"):
        return
    # A window as long as the context masks nothing.
    if layer_types is None and window < _integer(config, "max_position_embeddings"):
        raise ModelError(f"sliding_window {window}: sliding window attention is not supported")


_SCALING_KEYS: dict[RopeKind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
    "freq_factors": {"factors"},
}


def parse_rope(config: Config, context_length: int, head_dim: int) -> RopeSpec:
    """Parse `rope_scaling` with `rope_theta` beside it, or `rope_parameters` with both in it.

    Raises ModelError.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"rope_scaling must be an object, got {scaling!r}")
    kind = _rope_kind(scaling)
    asked = {key for key, value in scaling.items() if value is not None}
    if asked & {"partial_rotary_factor"} and scaling["partial_rotary_factor"] == 1.0:
        asked.discard("partial_rotary_factor")
    unknown = asked - _SCALING_KEYS[kind] - {"rope_type", "type", "rope_theta"}
    if unknown:
        raise ModelError(f"RoPE scaling {kind!r}: {', '.join(sorted(unknown))} is not supported")
    theta = _number(config, "rope_theta", 10000.0)
    theta = _number(scaling, "rope_theta", theta)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "freq_factors":
        factors = _factors(scaling.get("factors"))
        if len(factors) != head_dim // 2:
            raise ModelError(f"{len(factors)} RoPE frequency factors for head size {head_dim}")
        return RopeSpec(theta, kind, factors=factors)
    original = config.get("original_max_position_embeddings")
    if original is not None:
        scaling = scaling | {"original_max_position_embeddings": original}
    return _scaled(kind, theta, scaling, context_length)


def _factors(listed: Any) -> tuple[float, ...]:  # noqa: ANN401  (any JSON value)
    if not isinstance(listed, list):
        raise ModelError("config: RoPE frequency factors must be a list of positive numbers")
    return tuple(
        _number({"RoPE frequency factor": value}, "RoPE frequency factor") for value in listed
    )


def _rope_kind(scaling: Config) -> RopeKind:
    asked = scaling.get("rope_type") or scaling.get("type") or "default"
    for kind in _SCALING_KEYS:
        if kind == asked:
            return kind
    known = ", ".join(kind for kind in _SCALING_KEYS if kind != "freq_factors")
    raise ModelError(f"RoPE scaling {asked!r} is not supported (known: {known})")


def _scaled(kind: RopeKind, theta: float, scaling: Config, context_length: int) -> RopeSpec:
    factor = _number(scaling, "factor")
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    original = _integer(scaling, "original_max_position_embeddings", context_length)
    if kind == "llama3":
        low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
        if not low < high:
            raise ModelError(f"config: low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeSpec(theta, kind, factor, low, high, original)
    if theta == 1.0:
        raise ModelError("config: rope_theta must differ from 1 with yarn scaling")
    return RopeSpec(
        theta,
        kind,
        factor,
        original_context=original,
        beta_fast=_number(scaling, "beta_fast", 32.0),
        beta_slow=_number(scaling, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor),
        truncate=_flag(scaling, "truncate", True),
    )


def _yarn_attention_factor(scaling: Config, factor: float) -> float:
    """Compute YaRN's eq. 22 (arXiv:2309.00071), or DeepSeek's ratio if both mscales are set."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        return scale(1.0)
    return scale(_number(scaling, "mscale")) / scale(_number(scaling, "mscale_all_dim"))


def _integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is float and value.is_integer():
        value = int(value)
    largest = _LARGEST.get(key, (1 << 31) - 1)
    if type(value) is not int or not least <= value <= largest:
        raise ModelError(
            f"config: {key} must be an integer from {least} to {largest}, got {value!r:.80}"
        )
    return value


def _number(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not number or not 0.0 < value < math.inf:
        raise ModelError(f"config: {key} must be a positive number, got {value!r:.80}")
    return float(value)


def _flag(config: Config, key: str, default: bool = False) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not bool:
        raise ModelError(f"config: {key} must be true or false, got {value!r:.80}")
    return value
