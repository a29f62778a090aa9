"""LoRA adapters as the models see them: the host form of one, and its share of a linear map.

Made by the runner's loader from files, carried to a model in the ForwardBatch. One adapter adds
b (a x) to the outputs of the modules that it holds (arXiv:2106.09685); which rows of a step are its
own is worked out once per step. No files and no slots here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from .config import ModelSpec

# (layer, "q" | "k" | "v" | "o" | "gate" | "up" | "down"), or one of the two below.
Key = tuple[int, str]
EMBED: Key = (-1, "embed")
HEAD: Key = (-1, "head")


def layer_map_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each map of a layer that an adapter may hold, by the name in its key."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "q": (hidden, spec.q_size),
        "k": (hidden, spec.kv_size),
        "v": (hidden, spec.kv_size),
        "o": (spec.q_size, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }


def map_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The same, with the embedding and the head."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    return layer_map_sizes(spec) | {EMBED[1]: (vocab, hidden), HEAD[1]: (hidden, vocab)}


@dataclass(slots=True, frozen=True, eq=False)
class LoRAModule:
    """y += b (a x), in float32; the scaling is already in `b`.

    For the embedding `a` is [r, vocab], read by columns, and `b` is [hidden, r].
    """

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """Two adapters are equal only if they are one: equality is identity."""

    modules: dict[Key, LoRAModule]
    rank: int  # the largest of the modules'

    @cached_property
    def num_bytes(self) -> int:
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules.values())


Groups = list[tuple[LoRAAdapter, torch.Tensor]]  # each adapter and its rows, [n] int64


class StepLoRA(Protocol):
    """What the adapters of one step add; T rows, or those that `sampled` has picked."""

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int, parts: Mapping[str, int]) -> None:
        """Add every adapter's share to y [T, out], in place, where x [T, in] was the input.

        `parts` names the modules whose outputs lie side by side in y, with their sizes.
        """
        ...

    def add_embedding(self, y: torch.Tensor, input_ids: torch.Tensor) -> None:
        """The same for y [T, hidden], the embedding of input_ids [T]."""
        ...

    def sampled(self, wanted: torch.Tensor) -> "StepLoRA":
        """For the rows that `index_select(0, wanted)` leaves."""
        ...


class HostLoRA:
    """Adapters one after the other, each over its own rows, in plain torch operators."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int, parts: Mapping[str, int]) -> None:
        for adapter, rows in self._groups:
            own, start = x[rows].float(), 0
            for name, size in parts.items():
                module = adapter.modules.get((layer, name))
                if module is not None:
                    y[rows, start : start + size] += F.linear(F.linear(own, module.a), module.b)
                start += size

    def add_embedding(self, y: torch.Tensor, input_ids: torch.Tensor) -> None:
        """A one-hot x picks columns of `a`."""
        for adapter, rows in self._groups:
            module = adapter.modules.get(EMBED)
            if module is not None:
                y[rows] += F.linear(module.a[:, input_ids[rows]].T, module.b)

    def sampled(self, wanted: torch.Tensor) -> "HostLoRA":
        return HostLoRA(
            [
                (adapter, torch.isin(wanted, rows).nonzero().flatten())
                for adapter, rows in self._groups
            ]
        )


def group_rows(adapters: Sequence[LoRAAdapter | None], extend_lens: list[int]) -> Groups:
    """Rows of a step by adapter; `adapters` has one entry a request, or none at all."""
    order = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
    if not order:
        return []
    of_request = [-1 if adapter is None else order.index(adapter) for adapter in adapters]
    of_row = torch.tensor(of_request).repeat_interleave(torch.tensor(extend_lens))
    return [(adapter, (of_row == index).nonzero().flatten()) for index, adapter in enumerate(order)]
