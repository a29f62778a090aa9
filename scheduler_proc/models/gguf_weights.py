"""Filling a model's parameters from a GGUF file: names, dequantisation, order of the rows.

Called by the loader. Tensors of every type that the gguf package can dequantise are read; an
unknown name or type is an error.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from ...kernels.quantised_linear import RowFormat, Rows
from ...model_files.errors import ModelError
from ...model_files.gguf_file import metadata, open_gguf
from .config import ModelSpec
from .llama import LlamaForCausalLM
from .weights import Progress, Shapes, fill

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# The package works on 16 rows at a time; longer rows of about this many bytes let threads overlap.
_ROW_BYTES = 1 << 13
_THREADS = 4
_EXACT: dict[GGMLQuantizationType, RowFormat] = {
    GGMLQuantizationType.Q4_0: "Q4_0",
    GGMLQuantizationType.Q4_1: "Q4_1",
    GGMLQuantizationType.Q8_0: "Q8_0",
}
Number = TypeVar("Number", np.float32, np.uint8)


def fill_from_gguf(
    model: LlamaForCausalLM, path: str, exact: Mapping[str, Rows], progress: Progress
) -> None:
    """All tensors but those that are wanted in their own blocks, `exact`.

    The file's names and shapes have been checked. Raises ModelError for types not understood.
    """
    reader = open_gguf(path)
    named = _by_checkpoint_name(reader)
    permuted = metadata(reader)["general.architecture"] == "llama"

    def load(item: tuple[str, ReaderTensor]) -> int:
        name, tensor = item
        if name in exact:
            return 0
        cut = model.cuts.get(name)
        # Blocks run along a row: rows are cut before they are dequantised, columns after.
        rows = cut.index[0] if cut is not None else slice(None)
        values = _values(tensor, rows)
        heads = _interleaved_heads(name, model.spec) if permuted else 0
        part = torch.from_numpy(_unpermute(values, heads) if heads else values)
        fill(model, name, cut.of(part) if cut is not None and cut.dim else part)
        return model.weight_slots[name].nbytes

    with ThreadPoolExecutor(min(_THREADS, torch.get_num_threads())) as threads:
        for nbytes in threads.map(load, named.items()):
            progress(nbytes)


def gguf_shapes(path: str) -> Shapes:
    """Checkpoint name -> shape, from the file's header. Raises ModelError."""
    named = _by_checkpoint_name(open_gguf(path))
    return {name: [int(n) for n in reversed(tensor.shape)] for name, tensor in named.items()}


def _by_checkpoint_name(reader: GGUFReader) -> dict[str, ReaderTensor]:
    """Frequency factors of the rotary embedding are left out: they come in through the config."""
    return {
        _checkpoint_name(tensor.name): tensor
        for tensor in reader.tensors
        if tensor.name != "rope_freqs.weight"
    }


def exact_rows(path: str, spec: ModelSpec) -> dict[str, Rows]:
    """The tensors whose blocks the native formats hold exactly, by checkpoint name."""
    reader = open_gguf(path)
    permuted = metadata(reader)["general.architecture"] == "llama"
    found: dict[str, Rows] = {}
    for tensor in reader.tensors:
        row_format = _EXACT.get(tensor.tensor_type)
        if row_format is None:
            continue
        name = _checkpoint_name(tensor.name)
        heads = _interleaved_heads(name, spec) if permuted else 0
        blocks = np.array(tensor.data)  # its own copy: the map is closed with the reader
        values = torch.from_numpy(_unpermute(blocks, heads) if heads else blocks)
        found[name] = Rows(values, int(tensor.shape[0]), row_format)
    return found


def _checkpoint_name(name: str) -> str:
    """The name that the same tensor has in a Hugging Face checkpoint."""
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    raise ModelError(f"the GGUF file holds a tensor that is not used: {name}")


def _values(tensor: ReaderTensor, wanted: slice = slice(None)) -> npt.NDArray[np.float32]:
    """The wanted rows of the tensor in float32 and in memory of their own."""
    kind, data = tensor.tensor_type, tensor.data[wanted]
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return np.array(data, dtype=np.float32)
    shape = (*data.shape[:-1], int(tensor.shape[0]))
    rows, row_bytes = data.reshape(-1, data.shape[-1]).shape
    joined = 1
    while joined * row_bytes < _ROW_BYTES and rows % (joined * 2) == 0:
        joined *= 2
    try:
        values = dequantize(data.reshape(rows // joined, row_bytes * joined), kind)
    except NotImplementedError as error:
        raise ModelError(f"{tensor.name} has type {kind.name}, which is not supported") from error
    return np.asarray(values, dtype=np.float32).reshape(shape)


def _interleaved_heads(name: str, spec: ModelSpec) -> int:
    """How many heads of a llama file's tensor pair neighbours, as ggml's rotary embedding does."""
    if ".q_proj." in name:
        return spec.num_heads
    return spec.num_kv_heads if ".k_proj." in name else 0


def _unpermute(values: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Rows of each head from (pair, half) back to (half, pair) order."""
    if values.shape[0] % (heads * 2):
        raise ModelError(f"{values.shape[0]} rows do not make {heads} heads")
    halves = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
