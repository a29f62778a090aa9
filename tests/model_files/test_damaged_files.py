"""Damaged model files: each is refused in words that name the file and what is wrong in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenloom.model_files.chat_template import read_chat_template
from tokenloom.model_files.config import read_config
from tokenloom.model_files.end_tokens import read_end_tokens
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.tokenizer import load_tokenizer, read_special_tokens, tokenizer_size

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"
LETTERS = list("abcd")
MISSING = object()
VALUES: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*LETTERS, "ab"],
    "tokenizer.ggml.token_type": [1] * 5,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
}
KINDS = {str: "STRING", int: "INT32", float: "FLOAT32", list: "ARRAY", bool: "BOOL"}


def write(path: Path, **changes: object) -> Path:
    """`__` in a keyword stands for a dot."""
    writer = gguf.GGUFWriter(path, "llama")
    values = VALUES | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in values.items():
        if value is not MISSING:
            writer.add_key_value(key, value, getattr(gguf.GGUFValueType, KINDS[type(value)]))
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((16, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


READERS: list[Callable[[str], object]] = [
    read_config,
    read_end_tokens,
    load_tokenizer,
    tokenizer_size,
    read_special_tokens,
    read_chat_template,
]


def test_the_undamaged_file_is_read_by_all(tmp_path: Path) -> None:
    for read in READERS:
        read(str(write(tmp_path / "a.gguf")))


DAMAGED: dict[str, tuple[Callable[[str], object], dict[str, object], str]] = {
    "merge of an unknown piece": (
        load_tokenizer,
        {"tokenizer__ggml__merges": ["a b", "c z"]},
        r"merges\[1\] is 'c z', but 'z' is no token",
    ),
    "merge into an unknown token": (
        load_tokenizer,
        {"tokenizer__ggml__merges": ["c d"]},
        r"merges\[0\] is 'c d', but 'cd' is no token",
    ),
    "merge that is no pair": (
        load_tokenizer,
        {"tokenizer__ggml__merges": ["ab"]},
        r"merges\[0\] is 'ab', which is no pair",
    ),
    "tokens that are numbers": (
        tokenizer_size,
        {"tokenizer__ggml__tokens": [1, 2]},
        r"tokenizer\.ggml\.tokens must be an array of texts",
    ),
    "tokens that are one text": (
        tokenizer_size,
        {"tokenizer__ggml__tokens": "ab"},
        r"tokenizer\.ggml\.tokens must be an array of texts",
    ),
    "too few types": (
        load_tokenizer,
        {"tokenizer__ggml__token_type": [1]},
        r"tokenizer\.ggml\.token_type has 1 entries for 5 tokens",
    ),
    "a pre-tokenizer that is a number": (
        load_tokenizer,
        {"tokenizer__ggml__pre": 3},
        r"tokenizer\.ggml\.pre must be text, got 3",
    ),
    "an end that is text": (
        read_end_tokens,
        {"tokenizer__ggml__eos_token_id": "ab"},
        r"tokenizer\.ggml\.eos_token_id must be an integer, got 'ab'",
    ),
    "a template that is a number": (
        read_chat_template,
        {"tokenizer__chat_template": 3},
        "the chat template is a int",
    ),
    "layers that are text": (
        read_config,
        {"llama__block_count": "x"},
        r"llama\.block_count must be a positive integer, got 'x'",
    ),
    "no heads": (
        read_config,
        {"llama__attention__head_count": 0},
        r"llama\.attention\.head_count must be a positive integer, got 0",
    ),
    "heads for each layer": (
        read_config,
        {"llama__attention__head_count": [2, 2]},
        r"llama\.attention\.head_count must be a positive integer, got \[2, 2\]",
    ),
    "a missing size": (
        read_config,
        {"llama__embedding_length": MISSING},
        r"lacks the key llama\.embedding_length",
    ),
    "a scaling that is text": (
        read_config,
        {"llama__rope__scaling__factor": "x"},
        r"llama\.rope\.scaling\.factor must be a positive number, got 'x'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_wrong_value_is_refused_by_file_and_key(case: str, tmp_path: Path) -> None:
    read, changes, words = DAMAGED[case]
    with pytest.raises(ModelError, match=rf"a\.gguf.*{words}"):
        read(str(write(tmp_path / "a.gguf", **changes)))


def test_text_that_is_not_utf8_is_refused_by_its_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tokenizer__ggml__pre="gpt-2-marked")
    path.write_bytes(path.read_bytes().replace(b"gpt-2-marked", b"gpt-2-\xff\xfe\xfdked"))
    for read in READERS:
        with pytest.raises(ModelError, match=r"a\.gguf: tokenizer\.ggml\.pre is not UTF-8"):
            read(str(path))


def test_a_file_that_is_cut_is_refused_with_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    size = len(whole) - 100
    words = rf"cut short: tensor blk\.0\.ffn_up\.weight ends at byte \d+, the file at {size}"
    with pytest.raises(ModelError, match=rf"a\.gguf.*{words}"):
        read_config(str(path))
    path.write_bytes(whole[:300])
    with pytest.raises(ModelError, match=r"a\.gguf.*cut short"):
        read_config(str(path))


def test_sizes_of_a_tensor_that_no_file_has_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    for size in (1 << 40, (1 << 64) - 1, 0):
        path.write_bytes(whole[:at] + size.to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(ModelError, match=r"a\.gguf.*tensor token_embd\.weight"):
            read_config(str(path))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.gguf", read_config),
        ("config.json", read_config),
        ("generation_config.json", read_end_tokens),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer.json", tokenizer_size),
        ("tokenizer_config.json", read_special_tokens),
    ],
)
def test_a_pointer_in_place_of_a_file_says_what_to_do(
    name: str, read: Callable[[str], object], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(POINTER)
    path = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        read(str(path))


@pytest.mark.parametrize(
    "declared",
    [3, {"x": {"content": "a"}}, {"3": "a"}, {"3": {}}, {"3": {"content": 4}}],
)
def test_declared_tokens_that_are_none(declared: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        tokenizer_size(str(tmp_path))
