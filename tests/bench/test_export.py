"""A GGUF in other formats: the values are the same up to rounding, the tokenizer too."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file

from tokenloom.bench.export import write_gguf, write_hf_directory
from tokenloom.model_files.config import read_config
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.tokenizer import load_tokenizer

HIDDEN, FF, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 40
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FF, HIDDEN),
    "ffn_up": (FF, HIDDEN),
    "ffn_down": (HIDDEN, FF),
}


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(ord("A") + index) for index in range(VOCAB - 1)), "AB"])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        shapes |= {f"blk.{layer}.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_transformers_finds_the_same_model_in_the_directory_and_in_the_gguf(
    gguf: str, tmp_path: Path
) -> None:
    directory = tmp_path / "hf"
    write_hf_directory(gguf, directory)
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported = load(directory, dtype=torch.float32)
    original = load(tmp_path, gguf_file=Path(gguf).name, dtype=torch.float32)
    weights = exported.state_dict()
    for name, weight in original.state_dict().items():
        # Rounded to the 8 bits of a bf16 mantissa.
        torch.testing.assert_close(weights[name], weight, atol=0, rtol=2**-8)
    assert exported.config.rope_parameters["rope_theta"] == 10000.0
    assert exported.config.eos_token_id in (3, [3])
    stored = load_file(directory / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


def test_tokenizer_config_and_template_come_along(gguf: str, tmp_path: Path) -> None:
    directory = tmp_path / "hf"
    write_hf_directory(gguf, directory)
    assert load_tokenizer(str(directory)).get_vocab() == load_tokenizer(gguf).get_vocab()
    config, original = read_config(str(directory)), read_config(gguf)
    assert {key: config[key] for key in original if key != "eos_token_id"} == original
    assert "{{ messages }}" in (directory / "tokenizer_config.json").read_text()


def test_safetensors_starts_its_tensors_aligned(gguf: str, tmp_path: Path) -> None:
    write_hf_directory(gguf, tmp_path / "hf")
    with (tmp_path / "hf" / "model.safetensors").open("rb") as file:
        assert struct.unpack("<Q", file.read(8))[0] % 8 == 0


@pytest.mark.parametrize(("kind", "off_by"), [("BF16", 2**-8), ("Q8_0", 2**-6), ("Q4_0", 2**-2)])
def test_other_types_hold_the_same_values_within_their_precision(
    gguf: str, tmp_path: Path, kind: str, off_by: float
) -> None:
    target = tmp_path / "new" / "other.gguf"
    write_gguf(gguf, target, kind)
    before = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    after = {tensor.name: tensor for tensor in GGUFReader(target).tensors}
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        old = dequantize(before[name].data, before[name].tensor_type)
        new = dequantize(tensor.data, tensor.tensor_type)
        assert np.abs(new - old).max() <= off_by * np.abs(old).max()
    assert after["blk.0.ffn_up.weight"].tensor_type == GGMLQuantizationType[kind]
    assert after["output_norm.weight"].tensor_type == GGMLQuantizationType.F32
    embedding = after["token_embd.weight"].tensor_type
    assert embedding == GGMLQuantizationType["Q8_0" if kind == "Q4_0" else kind]
    assert read_config(str(target)) == read_config(gguf)
    assert load_tokenizer(str(target)).get_vocab() == load_tokenizer(gguf).get_vocab()


def test_what_was_left_half_done_is_done_again(gguf: str, tmp_path: Path) -> None:
    (tmp_path / "hf.part").mkdir()
    (tmp_path / "x.gguf.part").write_text("half")
    write_hf_directory(gguf, tmp_path / "hf")
    write_gguf(gguf, tmp_path / "x.gguf", "BF16")
    assert not list(tmp_path.glob("*.part"))


def test_what_cannot_be_exported_is_refused_by_name(gguf: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Q3_K"):
        write_gguf(gguf, tmp_path / "x.gguf", "Q3_K")
    writer = GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="qwen2"):
        write_hf_directory(str(tmp_path / "other.gguf"), tmp_path / "hf")
