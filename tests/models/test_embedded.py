"""The embedded model: logits and greedy ids equal transformers' own reading of the same file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenloom.model_files.end_tokens import read_end_tokens
from tokenloom.model_files.resolve import resolve_model
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM

# Any ids will do, with special tokens among them.
PROMPT = [1, 9690, 198, 504, 3575, 282, 4649, 314, 2, 198, 1, 4093, 198, 1780, 314, 260, 30]


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(resolve_model(None, None))


@pytest.fixture(scope="module")
def reference(path: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.slow
def test_logits_and_greedy_ids_equal_transformers(
    path: Path,
    reference: transformers.PreTrainedModel,
    load: Callable[[Path], LlamaForCausalLM],
    oracle: Callable[..., torch.Tensor],
    kv_pool: Callable[..., Any],
) -> None:
    model = load(path)
    assert (model.spec.num_layers, model.spec.head_dim, model.spec.tied) == (30, 64, True)
    pool = kv_pool(model.spec)
    logits = model.forward(pool.batch({"a": PROMPT}))
    expected = oracle(reference, PROMPT)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)

    ids = list(PROMPT)
    for _ in range(16):
        expected = oracle(reference, ids)[-1]
        assert logits[-1].argmax() == expected.argmax()
        ids.append(int(expected.argmax()))
        logits = model.forward(pool.batch({"a": ids[-1:]}))


def test_end_token(path: Path) -> None:
    assert read_end_tokens(str(path)).ids == (0, 2)
