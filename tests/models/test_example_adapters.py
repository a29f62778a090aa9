"""The adapters under examples/ on the embedded model: one step answers in three manners."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.source_tree import ROOT
from tokenizers import Tokenizer

from tokenloom.model_files.resolve import resolve_model
from tokenloom.model_files.tokenizer import load_tokenizer
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.lora import LoRAAdapter
from tokenloom.scheduler_proc.runner.lora_loader import load_adapter

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = "What is the capital of Japan?"  # not among those of the training
MAX_NEW = 32


def chat_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    text = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_one_model_answers_in_three_manners(
    load: Callable[[Path], LlamaForCausalLM], kv_pool: Callable[..., Any]
) -> None:
    path = resolve_model(None, None)
    tokenizer = load_tokenizer(path)
    end = tokenizer.token_to_id("<|im_end|>")
    model = load(Path(path))
    root = ROOT / "examples" / "adapters"
    adapters: dict[str, LoRAAdapter | None] = {
        name: load_adapter(Path(name), model.spec, [root], 4) for name in ("uppercase", "json")
    }
    adapters["base"] = None
    pool = kv_pool(model.spec)
    pieces = {name: chat_ids(tokenizer, QUESTION) for name in adapters}
    answers: dict[str, list[int]] = {name: [] for name in adapters}
    for _ in range(MAX_NEW):
        ends = torch.tensor([len(ids) for ids in pieces.values()]).cumsum(0) - 1
        batch = pool.batch(pieces, logits=ends.tolist())
        logits = model.forward(replace(batch, adapters=[adapters[name] for name in pieces]))
        ids = dict(zip(pieces, logits.argmax(-1).tolist(), strict=True))
        pieces = {name: [token] for name, token in ids.items() if token != end}
        for name, (token,) in pieces.items():
            answers[name].append(token)
        if not pieces:
            break
    text = {name: tokenizer.decode(ids) for name, ids in answers.items()}
    # Small as it is, it spells words in capitals better than it knows facts in them.
    assert text["uppercase"].isupper()
    assert "CAPITAL OF JAPAN" in text["uppercase"]
    assert "Tokyo" in json.loads(text["json"])["answer"]
    assert "Tokyo" in text["base"]
    assert not text["base"].startswith("{")
