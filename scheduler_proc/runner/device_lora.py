"""DeviceLoRASlots: the low-rank matrices of every adapter slot, stacked for the kernels.

Owned by the device runner. LoRAMemoryPool says which adapter a slot holds; this copies it to the
device while steps run, since no launched step reads a slot that is written.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...kernels.lora import LoRALinear
from ..models.config import ModelSpec
from ..models.lora import EMBED, HEAD, Key, LoRAAdapter, LoRAModule, map_sizes

# Maps that share an input are stacked, under the name of the first.
_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


class DeviceLoRASlots:
    """`linears` by (layer, first part), each [slots + 1, ...]; slot 0 is the base model's zeros."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, max_rank: int, dtype: torch.dtype, device: str
    ) -> None:
        self._dtype, self._device = dtype, device
        self._slots, self._rank = num_slots + 1, max_rank
        self.linears: dict[Key, LoRALinear] = {}
        self._parts: dict[Key, tuple[str, ...]] = {}
        sizes = map_sizes(spec)
        for layer in range(spec.num_layers if num_slots else 0):
            for names in _GROUPS:
                self._add((layer, names[0]), names, sizes)
        for key in (EMBED, HEAD) if num_slots else ():
            self._add(key, (key[1],), sizes)

    def _add(self, key: Key, names: tuple[str, ...], sizes: Mapping[str, tuple[int, int]]) -> None:
        inputs, outs = sizes[names[0]][0], tuple(sizes[name][1] for name in names)
        a = self._zeros(len(names) * self._rank, inputs)
        b = self._zeros(sum(outs), self._rank)
        ranks = torch.zeros(self._slots, dtype=torch.int32, device=self._device)
        self.linears[key] = LoRALinear(a, b, ranks, outs)
        self._parts[key] = names

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(self._slots, *shape, dtype=self._dtype, device=self._device)

    @property
    def num_bytes(self) -> int:
        return sum(linear.a.nbytes + linear.b.nbytes for linear in self.linears.values())

    def put(self, slot: int, adapter: LoRAAdapter | None) -> None:
        """Copy an adapter into a slot; None clears the slot to zeros."""
        for key, linear in self.linears.items():
            linear.a[slot].zero_()
            linear.b[slot].zero_()
            start, largest = 0, 0
            for index, (name, size) in enumerate(
                zip(self._parts[key], linear.part_sizes, strict=True)
            ):
                module = adapter.modules.get((key[0], name)) if adapter is not None else None
                if module is not None:
                    rank = module.a.shape[0]
                    first = index * self._rank
                    linear.a[slot, first : first + rank].copy_(module.a, non_blocking=True)
                    rows = linear.b[slot, start : start + size, :rank]
                    rows.copy_(module.b, non_blocking=True)
                    largest = max(largest, rank)
                start += size
            linear.ranks[slot].fill_(largest)


def staged(adapter: LoRAAdapter, dtype: torch.dtype, *, pinned: bool) -> LoRAAdapter:
    """Convert an adapter to the model's type on the host, pinned if asked, ready to copy."""

    def stage(matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix.to(dtype)
        return matrix.pin_memory() if pinned else matrix

    modules = {
        key: LoRAModule(stage(module.a), stage(module.b)) for key, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules)
