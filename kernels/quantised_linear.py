"""Linear maps with packed int8 or int4 weights and int8 activations: y = x W^T + b.

    int8: W ~ scale[n, k / 64] * q                 q in -127..127
    int4: W = scale[n, k / 32] * q + min[n, k/32]  q in 0..15; holds GGUF Q4_0 and Q4_1 exactly
    int8_sub: W = scale[n, k / 32] * q             holds GGUF Q8_0 exactly
    x ~ scale[t, k / 64] * q, quantised row by row at each call

Products within a group are summed as integers, groups in ascending order in float32, so a row's
result depends on that row alone. models/packed.py packs at load; the decoder stack (decoder.py)
multiplies. `quantised_linear` multiplies alone, for tests and benchmarks.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .cpu import native
from .cpu.arena import Arena

Kind = Literal["int8", "int4"]
RowFormat = Literal["float32", "Q4_0", "Q4_1", "Q8_0"]
BLOCK_ROWS = native.BLOCK  # weight rows (outputs) in a packed block
_KINDS = {"int8": native.INT8, "int4": native.INT4}
_GGUF = {
    "Q4_0": (native.INT4, native.GGUF_Q4_0, 18),
    "Q4_1": (native.INT4, native.GGUF_Q4_1, 20),
    "Q8_0": (native.INT8_SUB, native.GGUF_Q8_0, 34),
}


@dataclass(slots=True, frozen=True)
class Rows:
    """Unpacked rows of a weight: float32 [n, k], or GGUF blocks uint8 [n, bytes of k inputs]."""

    values: torch.Tensor
    k: int
    format: RowFormat = "float32"

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def pieces(self) -> Iterable[torch.Tensor]:
        return (self.values,)


@dataclass(slots=True, frozen=True)
class StreamedRows:
    """Rows read in pieces while they are packed. All pieces but the last are whole blocks."""

    pieces: Iterable[torch.Tensor]
    n: int
    k: int
    format: RowFormat = "float32"


@dataclass(slots=True, frozen=True)
class PackedWeight:
    data: torch.Tensor  # uint8
    scales: torch.Tensor  # bf16 or f16, stored as int16
    bias: torch.Tensor | None  # float32, n padded to whole blocks
    n: int
    k: int
    kind: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def struct(self) -> native.Weight:
        """Return pointers into these tensors; keep this object alive while they are used."""
        bias = None if self.bias is None else self.bias.data_ptr()
        data, scales = self.data.data_ptr(), self.scales.data_ptr()
        return native.Weight(data, scales, bias, self.n, self.k, _padded(self.k), self.kind)


def pack(
    parts: Sequence[Rows | StreamedRows],
    kind: Kind,
    *,
    alternate: bool = False,
    biases: Sequence[torch.Tensor] | None = None,
    threads: int = 1,
    arena: Arena | None = None,
) -> PackedWeight:
    """Pack one weight from parts stacked by rows, or interleaved by blocks (`alternate`).

    Weights of one model share an `arena`. `kind` applies to float rows; GGUF rows keep their own
    format. Raises ValueError if the parts do not share a packed format and k, if a part but the
    last is not a multiple of 16 rows (unless they alternate), or for malformed rows.
    """
    forms = {_form(part, kind) for part in parts}
    if len(forms) != 1 or len({part.k for part in parts}) != 1:
        raise ValueError("parts of a packed weight must share their form and their inputs")
    (form,) = forms
    if not alternate and any(part.n % native.BLOCK for part in parts[:-1]):
        raise ValueError(f"parts but the last must have a multiple of {native.BLOCK} rows")
    k = parts[0].k
    counts = [-(-part.n // native.BLOCK) for part in parts]
    library, k_pad = native.load(), _padded(k)
    arena = arena or Arena()
    data = arena.take(sum(counts) * library.tl_block_bytes(form, k_pad), torch.uint8)
    scales = arena.take(sum(counts) * library.tl_block_scales(form, k_pad), torch.int16)
    start = 0
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        first, step = (index, len(parts)) if alternate else (start, 1)
        for piece in part.pieces:
            values = piece.contiguous()
            job = native.PackJob(
                rows=values.data_ptr(),
                row_bytes=values.shape[1] * values.element_size(),
                data=data.data_ptr(),
                scales=scales.data_ptr(),
                n=values.shape[0],
                k=k,
                k_pad=k_pad,
                format=_row_format(values, part, kind),
                first_block=first,
                block_step=step,
                threads=threads,
            )
            if not library.tl_pack(ctypes.byref(job)):
                raise ValueError(f"{part.format} rows of {k} inputs cannot be packed")
            first += -(-values.shape[0] // native.BLOCK) * step
        start += count
    n = sum(counts) * native.BLOCK if alternate else sum(part.n for part in parts)
    return PackedWeight(data, scales, _pack_bias(biases, alternate), n, k, form)


def release_memory() -> None:
    """Return freed heap memory to the system. Call once after packing."""
    native.load().tl_release_memory()


def unpack(weight: PackedWeight) -> torch.Tensor:
    """Dequantise a packed weight to [n, k] float32."""
    out = torch.empty(weight.n, weight.k)
    struct = weight.struct()
    for row in range(weight.n):
        native.load().tl_unpack_row(ctypes.byref(struct), row, out[row].data_ptr())
    return out


def quantised_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    out: torch.Tensor | None = None,
    silu_mul: bool = False,
    isa: int | None = None,
) -> torch.Tensor:
    """Multiply x [T, k] float32 -> [T, n] on one thread; adds to `out` if given.

    `silu_mul`: gate and up blocks alternate; stores silu(gate) * up [T, n / 2], also into `out`.
    Raises ValueError if x is not float32 [T, k].
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != weight.k:
        raise ValueError(f"x must be float32 [T, {weight.k}], got {x.dtype} {list(x.shape)}")
    library = native.load()
    x, rows = x.contiguous(), x.shape[0]
    epilogue = native.SILU_MUL if silu_mul else native.STORE if out is None else native.ADD
    if out is None:
        out = torch.empty(rows, weight.n // 2 if silu_mul else weight.n)
    library.tl_linear(
        ctypes.byref(weight.struct()),
        x.data_ptr(),
        rows,
        out.data_ptr(),
        out.stride(0),
        epilogue,
        library.tl_best_isa() if isa is None else isa,
    )
    return out


def quantised_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, k], rounded to 8 bits per 64 inputs, with an unpacked weight [n, k]."""
    padding = -x.shape[1] % native.GROUP
    groups = torch.nn.functional.pad(x, (0, padding)).view(x.shape[0], -1, native.GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = (groups * torch.where(scale > 0, 1 / scale, 0)).round() * scale
    values = rounded.view(x.shape[0], -1)[:, : x.shape[1]]
    return (values.double() @ weight.double().T).float()


def _form(part: Rows | StreamedRows, kind: Kind) -> int:
    return _KINDS[kind] if part.format == "float32" else _GGUF[part.format][0]


def _row_format(values: torch.Tensor, part: Rows | StreamedRows, kind: Kind) -> int:
    if part.format == "float32":
        if values.dtype != torch.float32 or values.shape[1] != part.k:
            raise ValueError(f"rows must be float32 [n, {part.k}]")
        return native.FLOAT_TO_INT8 if kind == "int8" else native.FLOAT_TO_INT4
    _, row_format, block_bytes = _GGUF[part.format]
    if values.dtype != torch.uint8 or values.shape[1] != part.k // 32 * block_bytes:
        raise ValueError(f"{part.format} rows must be uint8 with {block_bytes} bytes per 32 inputs")
    return row_format


def _pack_bias(biases: Sequence[torch.Tensor] | None, alternate: bool) -> torch.Tensor | None:
    if biases is None:
        return None
    blocks = [
        torch.nn.functional.pad(bias.float(), (0, -bias.numel() % native.BLOCK)).view(
            -1, native.BLOCK
        )
        for bias in biases
    ]
    if alternate:
        return torch.stack(blocks, dim=1).flatten().contiguous()
    return torch.cat(blocks).flatten().contiguous()


def _padded(k: int) -> int:
    return -(-k // native.GROUP) * native.GROUP
