"""LoRA adapters as the models read them: LoRAAdapter, StepLoRA, and HostLoRA for a CPU.

Loaded from files by the runner, passed to a model in the ForwardBatch. An adapter adds b (a x) to
the outputs of its modules (arXiv:2106.09685); its rows of a step are found once per step. Files
and device slots must not enter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from .config import ModelSpec

# (layer, "q" | "k" | "v" | "o" | "gate" | "up" | "down"), EMBED or HEAD.
Key = tuple[int, str]
EMBED: Key = (-1, "embed")
HEAD: Key = (-1, "head")


def layer_map_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear map of a layer, by its name in Key."""
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
    """Return layer_map_sizes with the embedding and the head added."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    return layer_map_sizes(spec) | {EMBED[1]: (vocab, hidden), HEAD[1]: (hidden, vocab)}


@dataclass(slots=True, frozen=True, eq=False)
class LoRAModule:
    """Factors of y += b (a x), in float32; `b` is already scaled.

    For the embedding `a` is [r, vocab], read by columns, and `b` is [hidden, r].
    """

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """A loaded adapter, compared and hashed by identity."""

    modules: dict[Key, LoRAModule]
    rank: int  # largest rank of the modules

    @cached_property
    def num_bytes(self) -> int:
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules.values())


Groups = list[tuple[LoRAAdapter, torch.Tensor]]  # each adapter and its rows, [n] int64


class StepLoRA(Protocol):
    """The adapters of one step, over its T rows or over the rows of `sampled`."""

    def add(self, y: torch.Tensor, x: torch.Tensor, layer: int, parts: Mapping[str, int]) -> None:
        """Add every adapter's b (a x) to y [T, out] in place; x [T, in] is the input of y's map.

        `parts` maps the modules whose outputs are side by side in y to their sizes.
        """
        ...

    def add_embedding(self, y: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Add every adapter's share to y [T, hidden], the embedding of input_ids [T], in place."""
        ...

    def sampled(self, wanted: torch.Tensor) -> "StepLoRA":
        """Return the adapters over the rows of `index_select(0, wanted)`."""
        ...


class HostLoRA:
    """StepLoRA in torch operators, one adapter after the other, each over its own rows."""

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
        """Add to y in place; the columns of `a` replace a product with one-hot vectors."""
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
    """Group the rows of a step by adapter; `adapters` has one entry per request, or is empty."""
    order = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
    if not order:
        return []
    of_request = [-1 if adapter is None else order.index(adapter) for adapter in adapters]
    of_row = torch.tensor(of_request).repeat_interleave(torch.tensor(extend_lens))
    return [(adapter, (of_row == index).nonzero().flatten()) for index, adapter in enumerate(order)]
