"""Random adapters for the embedded model, in PEFT layout.

Called by `lora`, `lora_churn` and the tests of whole servers. Equal seeds and ranks give equal
adapters.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_HIDDEN, _INTERMEDIATE, _KEYS, _LAYERS = 576, 1536, 192, 30  # SmolLM2-135M
_SIZES = {  # outputs, inputs
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_KEYS, _HIDDEN),
    "self_attn.v_proj": (_KEYS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
}
MODULES = tuple(_SIZES)  # all maps of a layer
_SOME = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


def write_adapter(
    path: Path,
    seed: int,
    rank: int = 4,
    *,
    modules: tuple[str, ...] = _SOME,
    scale: float = 0.05,
) -> None:
    """Write an adapter that changes answers within a few tokens. `modules`: some of MODULES."""
    chosen = {name: _SIZES[name] for name in modules}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.partition(".")[2] for name in chosen],
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name, (outputs, inputs) in chosen.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, inputs, generator=random) / inputs**0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            b = torch.randn(outputs, rank, generator=random) * scale
            tensors[f"{prefix}.lora_B.weight"] = b
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
