"""LoRA adapters packed for the native decoder.

Adds B (A x) to chosen linear maps, in bf16 with float32 sums. A is laid out in tiles of 8 ranks and
4 inputs, B in pairs of ranks for each block of 16 outputs. The base weights stay unchanged. What an
adapter adds to a row depends on that row alone. Built once per adapter by models/packed.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .cpu import native
from .cpu.arena import Arena
from .decoder import DecoderShape

Factors = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r] already scaled
Key = tuple[int, str]  # (layer, map name), (-1, "embed") or (-1, "head")
_BLOCK = native.BLOCK
_RANKS, _INPUTS = native.LORA_RANKS, native.LORA_INPUTS


@dataclass(slots=True, frozen=True)
class _Place:
    """Position of a part's rows in its packed linear map."""

    start: int = 0  # row
    first_block: int | None = None  # None: the block that holds `start`
    block_step: int = 1


class DecoderAdapter:
    """One packed adapter. It owns the tensors that `struct` points into."""

    def __init__(
        self, shape: DecoderShape, num_layers: int, factors: Mapping[Key, Factors]
    ) -> None:
        self.rank = max((a.shape[0] for a, _ in factors.values()), default=0)
        self._tensors: list[torch.Tensor] = []
        self._linears = (native.LoraLinear * (4 * num_layers))()
        self.struct = native.LoraAdapter(linears=self._linears)
        self._memory = Arena(chunk=sum(_most_bytes(a, b) for a, b in factors.values()))
        for (layer, name), (a, b) in factors.items():
            linear, part, place = self._locate(shape, layer, name)
            packed_a = _embedding_a(a) if name == "embed" else _linear_a(a)
            linear.parts[part] = self._part(packed_a, b, place)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def _locate(
        self, shape: DecoderShape, layer: int, name: str
    ) -> tuple[native.LoraLinear, int, _Place]:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        match name:
            case "embed":
                return self.struct.embedding, 0, _Place()
            case "head":
                return self.struct.head, 0, _Place()
        index, part, place = {
            "q": (0, 0, _Place()),
            "k": (0, 1, _Place(q)),
            "v": (0, 2, _Place(q + kv)),
            "o": (1, 0, _Place()),
            "gate": (2, 0, _Place(0, 0, 2)),
            "up": (2, 1, _Place(0, 1, 2)),
            "down": (3, 0, _Place()),
        }[name]
        return self._linears[4 * layer + index], part, place

    def _part(self, packed_a: torch.Tensor, b: torch.Tensor, place: _Place) -> native.LoraPart:
        """Pack one part; a part that begins inside a block gets zero rows in front."""
        rank, (first, offset) = b.shape[1], divmod(place.start, _BLOCK)
        outputs = torch.zeros(_up(offset + b.shape[0], _BLOCK), _up(rank, 2))
        outputs[offset : offset + b.shape[0], :rank] = b
        pairs = outputs.to(torch.bfloat16).view(torch.int32)  # int32 keeps a pair of ranks together
        blocks = pairs.view(-1, _BLOCK, pairs.shape[1]).transpose(1, 2)
        return native.LoraPart(
            self._keep(packed_a),
            self._keep(blocks),
            rank,
            first if place.first_block is None else place.first_block,
            place.block_step,
            len(blocks),
        )

    def _keep(self, values: torch.Tensor) -> int:
        """Copy `values` into the arena and return the address."""
        kept = self._memory.take(values.numel(), values.dtype)
        kept.view(values.shape).copy_(values)
        self._tensors.append(kept)
        return kept.data_ptr()


def _most_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return an upper bound on the bytes of a part, padding included."""
    return 2 * _up(a.shape[0], _RANKS) * (a.shape[1] + b.shape[0] + 4 * _BLOCK)


def _linear_a(a: torch.Tensor) -> torch.Tensor:
    """Lay A [r, in] out in bf16 with the index of lora_a in cpu/src/common.h."""
    rank, inputs = a.shape
    padded = torch.zeros(_up(rank, _RANKS), _up(inputs, _INPUTS))
    padded[:rank, :inputs] = a
    fours = padded.to(torch.bfloat16).view(-1, 2, 2).transpose(1, 2).reshape(-1, _INPUTS)
    return fours.view(torch.int64).view(-1, _RANKS, padded.shape[1] // _INPUTS).transpose(1, 2)


def _embedding_a(a: torch.Tensor) -> torch.Tensor:
    """Transpose A [r, vocab] to bf16 [vocab, r], with r padded to an even number."""
    padded = torch.zeros(a.shape[1], _up(a.shape[0], 2))
    padded[:, : a.shape[0]] = a.T
    return padded.to(torch.bfloat16)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
