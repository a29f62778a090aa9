"""Random weights for `--load-format dummy`, which needs no weight files.

Called by the loader and by the device benchmarks.
"""

import zlib
from collections.abc import Collection, Mapping

import torch

from ...kernels.quantised_linear import StreamedRows
from .checkpoint import Index
from .llama import LlamaForCausalLM

_STD = 0.02


class DummyCheckpoint:
    """Checkpoint of random tensors with given shapes, seeded by their names."""

    def __init__(self, shapes: Mapping[str, list[int]]) -> None:
        self._shapes = shapes
        self._drawn: tuple[str, torch.Tensor] = ("", torch.empty(0))

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> list[int]:
        return self._shapes[name]

    def read(self, name: str, index: Index) -> torch.Tensor:
        last, whole = self._drawn
        if last != name:
            whole = dummy_tensor(name, self._shapes[name], "cpu")
            self._drawn = (name, whole)
        return whole[index]

    def blocks(self, name: str) -> StreamedRows | None:
        return None


def fill_dummy(model: LlamaForCausalLM) -> None:
    """Fill a model with random weights, drawn on its own device for speed.

    Each rank draws whole tensors, so that all ranks hold parts of the same model.
    """
    for name, slot in model.weight_slots.items():
        whole = dummy_tensor(name, model.checkpoint_shape(name), slot.device)
        slot.copy_(model.cuts[name].of(whole) if name in model.cuts else whole)


def dummy_tensor(name: str, shape: list[int], device: torch.device | str) -> torch.Tensor:
    """Draw a tensor: ones for a norm, else small normals, so logits stay finite at any depth."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(0.0, _STD, generator=generator)
