"""Random adapters made and saved by peft, the reference for ours."""

import copy
import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

EVERY_MODULE = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens",
    "lm_head",
]  # fmt: skip


def save_adapter(
    base: transformers.PreTrainedModel, directory: Path, seed: int = 0, **options: object
) -> PeftModel:
    """Save an adapter that changes much to `directory`; return a copy of `base` with it applied."""
    torch.manual_seed(seed)
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.15)
        model.save_pretrained(directory)
    return model
