"""Linear maps with packed int8 or int4 weights and int8 activations: y = x W^T + b.

    int8: W ~ scale[n, k / 64] * q                 q in -127..127
    int4: W = scale[n, k / 32] * q + min[n, k/32]  q in 0..15; GGUF's Q4_0 and Q4_1 exactly
    int8_sub: W = scale[n, k / 32] * q             GGUF's Q8_0 exactly
    x ~ scale[t, k / 64] * q, quantised row by row when it is used

Products within a group are summed as integers, the groups in ascending order in float32: a row's
result depends on nothing but the row. Packing runs at load; the products run inside the decoder
stack (decoder.py), and alone in `quantised_linear` for tests and benchmarks.
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
BLOCK_ROWS = native.BLOCK  # outputs of a weight that are packed together
_KINDS = {"int8": native.INT8, "int4": native.INT4}
_GGUF = {
    "Q4_0": (native.INT4, native.GGUF_Q4_0, 18),
    "Q4_1": (native.INT4, native.GGUF_Q4_1, 20),
    "Q8_0": (native.INT8_SUB, native.GGUF_Q8_0, 34),
}


@dataclass(slots=True, frozen=True)
class Rows:
    """Rows of a weight as they come: float32 [n, k], or GGUF blocks uint8 [n, bytes of k]."""

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
    """The same, read in pieces when they are packed: each but the last of whole blocks of rows."""

    pieces: Iterable[torch.Tensor]
    n: int
    k: int
    format: RowFormat = "float32"


@dataclass(slots=True, frozen=True)
class PackedWeight:
    data: torch.Tensor  # uint8
    scales: torch.Tensor  # int16 bits of bf16 or f16
    bias: torch.Tensor | None  # [n padded to blocks] float32
    n: int
    k: int
    kind: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def struct(self) -> native.Weight:
        """Pointers into this object's tensors: keep it alive."""
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
    """Pack one weight from parts below each other, or block by block in turn (`alternate`).

    Weights of one model share an `arena`. `kind` is for float rows; GGUF rows keep their own form,
    and all parts must end up in one. Parts but the last must fill whole blocks of 16 rows unless
    they alternate. Raises ValueError.
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
    """Give what loading has freed back to the system; call it once, when all is packed."""
    native.load().tl_release_memory()


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The values that a packed weight stands for, [n, k] float32."""
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
    """x [T, k] float32 -> [T, n], added to `out` if it is given; one thread.

    `silu_mul`: the weight alternates gate and up blocks, the result is silu(gate) * up, [T, n / 2].
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
    """x [T, k], weight [n, k] as unpacked: groups of 64 inputs of x are rounded to 8 bits."""
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
