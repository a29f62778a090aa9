"""Two ranks of a model say what one process says; what cannot be shared out is refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from models import rank_logits
from models.rank_logits import loaded, logits_of
from models.test_gguf import new_writer, write_model

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.parallel import Shard

RANKS = 2
DEADLINE_S = 120.0

# Of a head that divides and one that does not, tied and not; of KV heads for each rank and fewer.
CASES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (
        transformers.LlamaConfig,
        {"vocab_size": 98, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (transformers.Qwen2Config, {"vocab_size": 97, "tie_word_embeddings": False}),
    "qwen3": (
        transformers.Qwen3Config,
        {"vocab_size": 98, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "gguf": (transformers.LlamaConfig, {"vocab_size": 97, "tie_word_embeddings": True}),
    "dummy": (transformers.Qwen2Config, {"vocab_size": 98, "tie_word_embeddings": False}),
}


def write_cases(checkpoint: Callable[..., Any], directory: Path) -> None:
    """A directory for each, as rank_logits.py reads them."""
    for name, (config_class, fields) in CASES.items():
        model = checkpoint(config_class, intermediate_size=96, **fields)
        case = directory / name
        case.mkdir()
        files = [path for path in directory.iterdir() if path.is_file()]
        for path in files:
            path.rename(case / path.name)
        if name == "dummy":
            (case / "model.safetensors").unlink()
        if name == "gguf":
            write_model(new_writer(case / "model.gguf", model, "llama"), model, "llama", Kind.Q8_0)


def run_ranks(directory: Path) -> None:
    program = rank_logits.__file__
    assert program is not None
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", program, str(rank), str(RANKS), str(directory)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=DEADLINE_S)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_equal_one_process(checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    write_cases(checkpoint, tmp_path)
    run_ranks(tmp_path)
    for name in CASES:
        whole = logits_of(loaded(tmp_path / name))
        assert np.ptp(whole) > 0.1, "these logits tell nothing"
        first, second = (np.load(tmp_path / name / f"logits{rank}.npy") for rank in range(RANKS))
        np.testing.assert_allclose(first, whole, atol=1e-5, rtol=1e-5, err_msg=name)
        assert np.array_equal(first, second), f"{name}: ranks would choose different tokens"


def test_a_share_takes_its_part_of_the_memory(
    checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint(transformers.LlamaConfig, vocab_size=98, tie_word_embeddings=False)
    sizes = []
    for shard in (Shard(0, 1), Shard(1, 2)):
        linears = loaded(tmp_path, shard).layers[0].linears()
        sizes.append([one.weight.numel() for one in linears if one.weight is not None])
    assert [2 * half for half in sizes[1]] == sizes[0]


@pytest.mark.parametrize(
    ("fields", "size", "words"),
    [
        ({"num_attention_heads": 4}, 3, "--tp 3 does not divide the model's 4 attention heads"),
        ({"intermediate_size": 97}, 2, "--tp 2 does not divide the model's 97 rows"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
            4,
            "--tp 4 and the model's 6 KV heads: neither divides the other",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    fields: dict[str, int],
    size: int,
    words: str,
    checkpoint: Callable[..., Any],
    tmp_path: Path,
) -> None:
    checkpoint(transformers.LlamaConfig, **fields)
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path, Shard(0, size))


def test_a_misshapen_tensor_is_refused_by_a_rank_too(
    checkpoint: Callable[..., Any], edit_config: Callable[..., None], tmp_path: Path
) -> None:
    """Its own part would fit."""
    checkpoint(transformers.LlamaConfig)
    edit_config(intermediate_size=56)
    with pytest.raises(ModelError, match=r"shape \[112, 64\], the config asks for \[56, 64\]"):
        loaded(tmp_path, Shard(0, 2))
