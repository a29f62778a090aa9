"""parse_spec: defaults, and the refusal by name of whatever changes the maths and is not done."""

from typing import Any

import pytest

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.config import FAMILIES, parse_spec
from tokenloom.scheduler_proc.models.registry import MODELS

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 100,
}


def test_defaults() -> None:
    spec = parse_spec(BASE)
    assert (spec.num_kv_heads, spec.head_dim, spec.context_length) == (4, 16, 128)
    assert (spec.rope.kind, spec.rope.theta, spec.rms_norm_eps) == ("default", 10000.0, 1e-6)
    assert not any((spec.tied, spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm))


def test_every_known_architecture_has_a_class() -> None:
    assert FAMILIES.keys() == MODELS.keys()


def test_biases_follow_the_family() -> None:
    for name, expected in {
        "LlamaForCausalLM": (True, True),
        "Qwen2ForCausalLM": (True, False),
        "Qwen3ForCausalLM": (True, True),
    }.items():
        spec = parse_spec(BASE | {"architectures": [name], "attention_bias": True})
        assert (spec.qkv_bias, spec.o_bias) == expected


def test_qwen3_head_dim_has_its_own_default() -> None:
    assert parse_spec(BASE | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


REFUSED = {
    "unknown architecture": ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    "no architecture": ({"architectures": None}, "architecture None"),
    "smollm3": ({"architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
    "quantisation": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "experts of qwen": ({"num_experts": 8}, "num_experts"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotary, v5": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "attention softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "nope layers": ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "logit scale": ({"logits_scaling": 8.0}, "logits_scaling"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    "hidden": ({"num_attention_heads": 5}, "hidden_size 64"),
    "odd head": ({"head_dim": 15}, "head_dim 15"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
    "unknown rope key": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
        "mrope_section",
    ),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "per-layer rope": ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
    "missing key": ({"vocab_size": None}, "vocab_size"),
    "boolean size": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "flag as text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "mistral bias": (
        {"architectures": ["MistralForCausalLM"], "attention_bias": True},
        "attention_bias",
    ),
    "qwen mlp bias": ({"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    fields, named = REFUSED[case]
    with pytest.raises(ModelError, match=named):
        parse_spec(BASE | fields)


SLIDING = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "layer types": {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
    },
}
NOT_SLIDING = {
    "mistral null": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mistral as long as the context": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 128,
    },
    "qwen2 off": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 16,
        "use_sliding_window": False,
    },
    "qwen2 above the last layer": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    "layer types": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 16,
        "layer_types": ["full_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("case", SLIDING)
def test_a_sliding_window_in_use_is_refused(case: str) -> None:
    with pytest.raises(ModelError, match="sliding"):
        parse_spec(BASE | SLIDING[case])


@pytest.mark.parametrize("case", NOT_SLIDING)
def test_a_sliding_window_not_in_use_is_no_matter(case: str) -> None:
    assert parse_spec(BASE | NOT_SLIDING[case]).num_layers == 2


def test_the_trained_length_may_stand_beside_the_scaling() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert parse_spec(BASE | {"rope_scaling": scaling}).rope.original_context == 128
    outer = {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert parse_spec(BASE | outer).rope.original_context == 32
