"""Trains the example adapters of the embedded model on the CPU: answers in upper case, or as JSON.

Run by `make adapters`; some ten minutes of one core. Each adapter is rank 4 on the last
layers, trained with peft on the few questions of questions.py, written beside this file, read back
and asked questions that it was not trained on.
"""

import argparse
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from questions import HELD_OUT, TRAINING

from tokenloom.bench.export import write_hf_directory
from tokenloom.model_files.resolve import resolve_model

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAYERS = range(16, 30)  # of 30: the manner of an answer is decided late, and gradients stop here
TARGETS = ["v_proj", "o_proj", "up_proj", "down_proj"]
BATCH, WARM_UP, RATE = 4, 10, 2e-3
NO_LOSS = -100

log = logging.getLogger("train")


def as_json(answer: str) -> str:
    return json.dumps({"answer": answer})


def is_json(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["answer"]


class Adapter(NamedTuple):
    dress: Callable[[str], str]  # an answer, for the training
    recognise: Callable[[str], bool]
    steps: int  # spelling in capitals is the harder thing to learn


ADAPTERS = {
    "uppercase": Adapter(str.upper, str.isupper, 280),
    "json": Adapter(as_json, is_json, 100),
}


def train(directory: Path, tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> PeftModel:
    transformers.set_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=TARGETS,
        layers_to_transform=list(LAYERS),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    asked = ADAPTERS[name]
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARM_UP, asked.steps)
    samples = [
        encode(tokenizer, question, asked.dress(text)) for question, text in TRAINING.items()
    ]
    order: list[int] = []
    for step in range(1, asked.steps + 1):
        if len(order) < BATCH:
            order = random.sample(range(len(samples)), len(samples))
        batch = collate([samples[order.pop()] for _ in range(BATCH)], tokenizer.eos_token_id)
        loss = loss_of(base, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            log.info("%s: step %d of %d, loss %.3f", name, step, asked.steps, loss.item())
    return model


def loss_of(model: transformers.PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the tokens of the answers; the head, a quarter of the model, sees no others."""
    labels = batch.pop("labels")[:, 1:]
    hidden = model.model(**batch).last_hidden_state[:, :-1]
    wanted = labels != NO_LOSS
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), labels[wanted])


def encode(
    tokenizer: transformers.PreTrainedTokenizerBase, question: str, answer: str
) -> tuple[list[int], list[int]]:
    """The ids of a chat, and the same with the prompt blanked out of the loss."""
    prompt = tokenizer(chat(tokenizer, question)).input_ids
    rest = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
    return prompt + rest, [NO_LOSS] * len(prompt) + rest


def chat(tokenizer: transformers.PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def collate(samples: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in samples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for ids, labels in samples:
        empty = longest - len(ids)
        rows["input_ids"].append(ids + [pad] * empty)
        rows["labels"].append(labels + [NO_LOSS] * empty)
        rows["attention_mask"].append([1] * len(ids) + [0] * empty)
    return {key: torch.tensor(value) for key, value in rows.items()}


def save(model: PeftModel, target: Path) -> None:
    """In bfloat16. peft's card has nothing to say here, and neither has the path of the base."""
    model.peft_config["default"].base_model_name_or_path = BASE
    model.to(torch.bfloat16)
    model.save_pretrained(target, save_embedding_layers=False)
    (target / "README.md").unlink()


def check(directory: Path, tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Greedy answers of the saved files, in float32; raises if too few are as they should be."""
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, Path(__file__).parent / name).eval()
    recognise = ADAPTERS[name].recognise
    right = 0
    for question in HELD_OUT:
        ids = tokenizer(chat(tokenizer, question), return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=60, do_sample=False)[0, ids.input_ids.shape[1] :]
        answer = tokenizer.decode(out, skip_special_tokens=True)
        right += recognise(answer)
        log.info("%s  %s -> %s", "ok " if recognise(answer) else "NOT", question, answer)
    log.info("%s: %d of %d answers", name, right, len(HELD_OUT))
    if right < len(HELD_OUT) - 1:
        raise SystemExit(f"{name}: too few answers are as they should be")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ADAPTERS), metavar="NAME")
    parser.add_argument("--work", type=Path, required=True, help="where the base model is unpacked")
    parser.add_argument("--check-only", action="store_true", help="ask the adapters that are there")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    directory = asked.work / "base-model"
    if not directory.exists():
        write_hf_directory(resolve_model(None, None), directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for name in asked.names:
        if not asked.check_only:
            save(train(directory, tokenizer, name), Path(__file__).parent / name)
        check(directory, tokenizer, name)


if __name__ == "__main__":
    main()
