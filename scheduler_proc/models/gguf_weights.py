"""GGUF files as a Checkpoint: maps names, dequantises, and restores the order of rows.

Built by the loader. Reads every type that the gguf package can dequantise; an unknown name or type
is an error. Building a model must not enter.
"""

import re
from collections.abc import Collection
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from ...kernels.quantised_linear import RowFormat, StreamedRows
from ...model_files.errors import ModelError
from ...model_files.gguf_file import metadata, open_gguf
from .checkpoint import Index, row_slices
from .config import ModelSpec

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
# The gguf package works on 16 rows at a time; joining rows to about this size lets threads overlap.
_ROW_BYTES = 1 << 13
_EXACT: dict[GGMLQuantizationType, RowFormat] = {
    GGMLQuantizationType.Q4_0: "Q4_0",
    GGMLQuantizationType.Q4_1: "Q4_1",
    GGMLQuantizationType.Q8_0: "Q8_0",
}
Number = TypeVar("Number", np.float32, np.uint8)


class GgufCheckpoint:
    def __init__(self, path: str, spec: ModelSpec) -> None:
        """Open the file. Raises ModelError for an unreadable file or an unknown tensor name."""
        reader = open_gguf(path)
        self._spec = spec
        # RoPE frequency factors are read by model_files/config.py.
        self._tensors = {
            _checkpoint_name(tensor.name): tensor
            for tensor in reader.tensors
            if tensor.name != "rope_freqs.weight"
        }
        self._permuted = metadata(reader)["general.architecture"] == "llama"

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> list[int]:
        return [int(size) for size in reversed(self._tensors[name].shape)]

    def read(self, name: str, index: Index) -> torch.Tensor:
        # Quantised blocks run along a row, so columns can be cut only after dequantisation.
        values = self._in_order(name, _values(self._tensors[name], index[0]))
        return torch.from_numpy(values[(slice(None), *index[1:])])

    def blocks(self, name: str) -> StreamedRows | None:
        tensor = self._tensors[name]
        row_format = _EXACT.get(tensor.tensor_type)
        if row_format is None:
            return None
        n, k = self.shape(name)
        pieces = (
            torch.from_numpy(self._in_order(name, np.array(tensor.data[rows])))
            for rows in row_slices((n, k), self._spec.head_dim)
        )
        return StreamedRows(pieces, n, k, row_format)

    def _in_order(self, name: str, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Restore the checkpoint's row order in q and k of llama files.

        Those store the two rows of a rotary pair side by side, as ggml's rotary embedding needs.
        """
        if not self._permuted or (".q_proj." not in name and ".k_proj." not in name):
            return rows
        return _unpermute(rows, rows.shape[0] // self._spec.head_dim)


def _checkpoint_name(name: str) -> str:
    """Map a GGUF tensor name to its Hugging Face name. Raises ModelError if unknown."""
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    raise ModelError(f"the GGUF file holds a tensor that is not used: {name}")


def _values(tensor: ReaderTensor, wanted: slice = slice(None)) -> npt.NDArray[np.float32]:
    """Dequantise rows of a tensor to a new float32 array. Raises ModelError for its type."""
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


def _unpermute(values: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Reorder the rows of each head from (pair, half) to (half, pair)."""
    halves = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
