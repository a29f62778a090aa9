"""Low-rank adapters in the form that the native decoder multiplies with.

y += B (A x) for chosen linear maps, in bf16 with float32 sums, A laid out for 8 ranks and 4 inputs
at a time, B for pairs of ranks in the blocks of 16 outputs of its map. The base stays as it is
packed. What an adapter adds to a row depends on that row alone. Made once per adapter by
models/packed.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .cpu import native
from .cpu.arena import Arena
from .decoder import DecoderShape

Factors = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r] with the scaling in it
Key = tuple[int, str]  # layer and name of the map; (-1, "embed") and (-1, "head")
_BLOCK = native.BLOCK
_RANKS, _INPUTS = native.LORA_RANKS, native.LORA_INPUTS


@dataclass(slots=True, frozen=True)
class _Place:
    """Where the rows of a part lie in the packed map that it belongs to."""

    start: int = 0  # row
    first_block: int | None = None  # None: that of `start`
    block_step: int = 1


class DecoderAdapter:
    """Keeps its tensors alive; `struct` points into them."""

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
        """A part may begin within a block: its rows there are zero."""
        rank, (first, offset) = b.shape[1], divmod(place.start, _BLOCK)
        outputs = torch.zeros(_up(offset + b.shape[0], _BLOCK), _up(rank, 2))
        outputs[offset : offset + b.shape[0], :rank] = b
        pairs = outputs.to(torch.bfloat16).view(torch.int32)  # of ranks: they stay together
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
        """The address of a copy."""
        kept = self._memory.take(values.numel(), values.dtype)
        kept.view(values.shape).copy_(values)
        self._tensors.append(kept)
        return kept.data_ptr()


def _most_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """What a part takes at most, with all that pads it."""
    return 2 * _up(a.shape[0], _RANKS) * (a.shape[1] + b.shape[0] + 4 * _BLOCK)


def _linear_a(a: torch.Tensor) -> torch.Tensor:
    """As lora_a in cpu/src/common.h finds them."""
    rank, inputs = a.shape
    padded = torch.zeros(_up(rank, _RANKS), _up(inputs, _INPUTS))
    padded[:rank, :inputs] = a
    fours = padded.to(torch.bfloat16).view(-1, 2, 2).transpose(1, 2).reshape(-1, _INPUTS)
    return fours.view(torch.int64).view(-1, _RANKS, padded.shape[1] // _INPUTS).transpose(1, 2)


def _embedding_a(a: torch.Tensor) -> torch.Tensor:
    """[ids, ranks], an even number of them."""
    padded = torch.zeros(a.shape[1], _up(a.shape[0], 2))
    padded[:, : a.shape[0]] = a.T
    return padded.to(torch.bfloat16)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
