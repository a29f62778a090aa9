"""MHATokenToKVPool: the K and V buffers. SlotTable: the slot of each position of each row.

Owned by the model runner; the models read and write the buffers through ForwardBatch. Core decides
which page belongs to which row and sends new page table entries.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.cpu.arena import map_memory


@dataclass(slots=True, frozen=True)
class KVShape:
    """Shape and type of one token's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class MHATokenToKVPool:
    """`k_cache[layer]` and `v_cache[layer]`: [num_tokens + page_size, num_kv_heads, head_dim].

    The first page of slots is padding and not part of the capacity `num_tokens`. Memory is
    committed at its first write, so a pool costs only what was used of it.
    """

    def __init__(self, shape: KVShape, num_tokens: int, page_size: int) -> None:
        self.num_pages = num_tokens // page_size + 1  # including the padding page
        num_slots = self.num_pages * page_size
        self.k_cache = [_lazy_zeros(shape, num_slots) for _ in range(shape.num_layers)]
        self.v_cache = [_lazy_zeros(shape, num_slots) for _ in range(shape.num_layers)]


def _lazy_zeros(shape: KVShape, num_slots: int) -> torch.Tensor:
    """Zeros that take no memory until touched; torch.zeros on a CPU would write them."""
    size = (num_slots, shape.num_kv_heads, shape.head_dim)
    num_bytes = num_slots * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    return torch.frombuffer(map_memory(num_bytes), dtype=shape.dtype).view(size)


class SlotTable:
    """The runner's copy of the page table, expanded to slots so that a step reads plain slices.

    Entries past a row's length are stale and never read.
    """

    def __init__(self, num_rows: int, max_tokens: int, page_size: int) -> None:
        max_pages = -(-max_tokens // page_size)
        # np.zeros uses calloc: unused rows cost no memory
        self._pages = np.zeros((num_rows, max_pages), dtype=np.int32)
        self.page_table = torch.from_numpy(self._pages)  # [num_rows, max_pages] int32
        self._by_page = np.zeros((num_rows, max_pages, page_size), dtype=np.int64)
        self._slots = self._by_page.reshape(num_rows, max_pages * page_size)
        self._slots_tensor = torch.from_numpy(self._slots)
        self._in_page = np.arange(page_size, dtype=np.int64)
        self._page_size = page_size

    def set_pages(self, new_pages: list[tuple[int, int, int]]) -> None:
        """Apply (row, index in its page table, page) entries."""
        if not new_pages:
            return
        rows, indices, pages = np.array(new_pages, dtype=np.int64).T
        self._pages[rows, indices] = pages
        self._by_page[rows, indices] = pages[:, None] * self._page_size + self._in_page

    def of_row(self, row: int, length: int) -> torch.Tensor:
        """Slots [length] int64 of the row's first positions. A view: valid until the next step."""
        return self._slots_tensor[row, :length]

    def of_tokens(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Slot [T] int64 of each (row, position)."""
        return torch.from_numpy(self._slots[rows, positions])
