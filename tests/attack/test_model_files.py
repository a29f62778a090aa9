"""Damaged model files: each is refused in words that name it, or loads; no crash, no hang."""

import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

pytestmark = [pytest.mark.attack, pytest.mark.slow]

CASES = 120  # of each kind
SECONDS = 240  # for all of a kind: some 0.1 s each, and the start of Python
VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 320, 64, 128, 2, 4, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
MARKERS = ["<|im_start|>", "<|im_end|>"]
ODD_NUMBERS = [b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 40), struct.pack("<Q", 1 << 62)]
ODD_VALUES: list[Any] = [0, 1, -1, 7, 1 << 31, 1 << 62, 0.5, 1e308, "x", "", None, True, [], {}]


def weights() -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    kv = HIDDEN // HEADS * KV_HEADS
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    normal = np.random.default_rng(0).standard_normal
    return {name: (normal(shape) * 0.05).astype(np.float32) for name, shape in shapes.items()}


def vocabulary() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = [f"tok{index}" for index in range(VOCAB - len(letters) - 1 - len(MARKERS))]
    return [*letters, "to", *fill, *MARKERS]


def write_directory(path: Path) -> Path:
    path.mkdir()
    save_file(weights(), path / "model.safetensors")
    tokens = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    tokenizer.save(str(path / "tokenizer.json"))
    told = {"eos_token": MARKERS[1], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "eos_token_id": VOCAB - 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([1] * (VOCAB - 2) + [3, 3])
    writer.add_token_merges(["t o"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, values in weights().items():
        kind = Kind.F32 if values.ndim == 1 else Kind.Q8_0 if "embed" in name else Kind.Q4_0
        data = quantize(values, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """The bytes cut, with bits flipped, with an odd number, with bytes lost or more of them."""
    data = bytearray(whole)
    head = min(len(data), rng.choice((64, 1500, 6000, len(data))))
    at = rng.randrange(head)
    match rng.randrange(5):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            for _ in range(rng.choice((1, 1, 4, 16))):
                data[rng.randrange(head)] ^= 1 << rng.randrange(8)
        case 2:
            data[at : at + 8] = rng.choice(ODD_NUMBERS)
        case 3:
            del data[at : at + rng.randrange(1, 64)]
        case 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 64))
    return bytes(data)


def odd_config(whole: bytes, rng: random.Random) -> bytes:
    config = json.loads(whole)
    more = ["head_dim", "sliding_window", "rope_scaling", "attention_bias", "rope_parameters"]
    for _ in range(rng.choice((1, 1, 2))):
        config[rng.choice([*config, *more])] = rng.choice(ODD_VALUES)
    return json.dumps(config).encode()


def verdicts(paths: list[Path]) -> list[str]:
    """What the loader said of each file; shorter than `paths` where the process has ended."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("load_files.py"))],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    said = done.stdout.splitlines()
    assert len(said) == len(paths), f"{paths[len(said)]}: {done.returncode}\n{done.stderr[-2000:]}"
    return said


def assert_in_words(paths: list[Path]) -> None:
    said = verdicts(paths)
    for path, words in zip(paths, said, strict=True):
        assert words == "loaded" or str(path) in words, f"{path}: {words}"
    assert sum(words != "loaded" for words in said) > len(said) / 5


def test_undamaged_files_load(tmp_path: Path) -> None:
    paths = [write_directory(tmp_path / "hf"), write_gguf(tmp_path / "m.gguf")]
    assert verdicts(paths) == ["loaded", "loaded"]


def test_damaged_gguf_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    rng = random.Random(7)
    paths = [tmp_path / f"{index}.gguf" for index in range(CASES)]
    for path in paths:
        path.write_bytes(damaged(whole, rng))
    assert_in_words(paths)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", damaged),
        ("tokenizer.json", damaged),
        ("config.json", damaged),
        ("config.json", odd_config),
    ],
)
def test_damaged_directories(
    name: str, damage: Callable[[bytes, random.Random], bytes], tmp_path: Path
) -> None:
    whole = write_directory(tmp_path / "whole")
    rng = random.Random(7)
    paths = [tmp_path / str(index) for index in range(CASES)]
    for path in paths:
        shutil.copytree(whole, path)
        (path / name).write_bytes(damage((whole / name).read_bytes(), rng))
    assert_in_words(paths)
