"""Convert a GGUF model for peers: a Hugging Face directory in bf16, or other GGUF types.

Called by `peers`, so that all engines run the same values. Only the llama architecture.
Requantising loses precision: use the results to measure speed, not quality.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize, quantize

from ..model_files.chat_template import read_chat_template
from ..model_files.config import read_config
from ..model_files.end_tokens import read_end_tokens
from ..model_files.errors import ModelError
from ..model_files.gguf_file import metadata, open_gguf
from ..model_files.tokenizer import load_tokenizer, read_special_tokens

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FILE_TYPES = {
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
_HEADS = ("token_embd.weight", "output.weight")


def write_hf_directory(gguf: str, directory: Path) -> None:
    """Write config.json, tokenizer files and bf16 model.safetensors, atomically.

    Raises ModelError for an architecture other than llama.
    """
    reader = _open_llama(gguf)
    part = _beside(directory)
    part.mkdir(parents=True)
    tokenizer = load_tokenizer(gguf)
    ends = {"eos_token_id": list(read_end_tokens(gguf).ids)}
    config = read_config(gguf)
    config |= {"model_type": "llama", "torch_dtype": "bfloat16", **ends}
    _write_json(part / "config.json", config)
    _write_json(part / "generation_config.json", ends)
    tokenizer.save(str(part / "tokenizer.json"))
    _write_json(part / "tokenizer_config.json", _tokenizer_config(gguf, config))
    _write_safetensors(part / "model.safetensors", dict(_checkpoint(reader, config)))
    part.rename(directory)


def write_gguf(source: str, target: Path, kind: str) -> None:
    """Write `source` with its matrices in `kind`: BF16, Q8_0 or Q4_0, atomically.

    As with llama.cpp's own tool, vectors stay as they are and embedding and head have at least 8
    bits. Raises ModelError for another kind or architecture.
    """
    if kind not in _FILE_TYPES:
        raise ModelError(f"{kind!r} is none of {', '.join(_FILE_TYPES)}")
    reader = _open_llama(source)
    part = _beside(target)
    part.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, "llama")
    _copy_metadata(reader, writer)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        at_least_8_bits = tensor.name in _HEADS and kind == "Q4_0"
        quant = GGMLQuantizationType["Q8_0" if at_least_8_bits else kind]
        writer.add_tensor(tensor.name, quantize(_values(tensor), quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def _open_llama(path: str) -> GGUFReader:
    reader = open_gguf(path)
    architecture = metadata(reader).get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"only llama models can be exported; {path} holds {architecture!r}")
    return reader


def _beside(path: Path) -> Path:
    """Return the temporary path for `path`, cleared of leftovers from an interrupted run."""
    part = path.with_name(f"{path.name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    return part


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # written by the writer itself
        kind, *items = field.types
        value = field.contents()
        if kind != GGUFValueType.ARRAY:
            writer.add_key_value(name, value, kind)
        elif items:  # an empty array has no type and says nothing
            writer.add_key_value(name, value, kind, items[-1])


def _checkpoint(
    reader: GGUFReader, config: dict[str, Any]
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise ModelError("frequency factors have no place in this config.json")
        heads = 0
        if ".attn_q." in tensor.name:
            heads = config["num_attention_heads"]
        elif ".attn_k." in tensor.name:
            heads = config["num_key_value_heads"]
        values = _values(tensor)
        yield _checkpoint_name(tensor.name), _unpermute(values, heads) if heads else values


def _checkpoint_name(name: str) -> str:
    match name.split("."):
        case [top, "weight"] if top in _TOP:
            return f"{_TOP[top]}.weight"
        case ["blk", layer, part, "weight" | "bias" as kind] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    raise ModelError(f"the GGUF file holds a tensor without a name elsewhere: {name}")


def _values(tensor: ReaderTensor) -> npt.NDArray[np.float32]:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows of each head from ggml's (pair, half) order to (half, pair)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _write_safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Write bf16 safetensors: 8-byte header length, JSON header, tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + 2 * values.size
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": (start, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in tensors.values():
            file.write(_bf16(values).tobytes())


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return the bf16 bits, rounded to nearest even."""
    return np.asarray(quantize(values, GGMLQuantizationType.BF16))


def _tokenizer_config(gguf: str, config: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = dict(read_special_tokens(gguf))
    template = read_chat_template(gguf)
    if template is not None:
        told["chat_template"] = template
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    told["model_max_length"] = config["max_position_embeddings"]
    return told


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
