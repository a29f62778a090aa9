"""Low-rank adapters in the form that the native decoder multiplies with.

y += B (A x) for chosen linear maps, in bf16 with float32 sums, the rows of A laid out for 16 ranks
at a time and B in the blocks of 16 outputs of its map. The base stays as it is packed. What an
adapter adds to a row depends on that row alone. Made once per adapter by models/packed.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .cpu import native
from .decoder import DecoderShape

Factors = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r] with the scaling in it
Key = tuple[int, str]  # layer and name of the map; (-1, "embed") and (-1, "head")
_BLOCK = native.BLOCK


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
        self._tensors: list[torch.Tensor] = []
        self.rank = max((a.shape[0] for a, _ in factors.values()), default=0)
        self._linears = (native.LoraLinear * (4 * num_layers))()
        self.struct = native.LoraAdapter(linears=self._linears)
        for (layer, name), (a, b) in factors.items():
            linear, part, place = self._locate(shape, layer, name)
            linear.parts[part] = self._part(a, b, place)

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

    def _part(self, a: torch.Tensor, b: torch.Tensor, place: _Place) -> native.LoraPart:
        """A part may begin within a block: its rows there are zero."""
        rank, (first, offset) = a.shape[0], divmod(place.start, _BLOCK)
        blocks = -(-(offset + b.shape[0]) // _BLOCK)
        rows = torch.zeros(blocks * _BLOCK, rank)
        rows[offset : offset + b.shape[0]] = b
        columns = torch.zeros(a.shape[1], -(-rank // _BLOCK) * _BLOCK)
        columns[:, :rank] = a.T
        by_block = rows.view(blocks, _BLOCK, rank).transpose(1, 2)
        packed = [values.to(torch.bfloat16).contiguous() for values in (columns, by_block)]
        self._tensors += packed
        return native.LoraPart(
            packed[0].data_ptr(),
            packed[1].data_ptr(),
            rank,
            first if place.first_block is None else place.first_block,
            place.block_step,
            blocks,
        )
