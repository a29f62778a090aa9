"""Memory in huge pages, where the system has them: what a step streams through.

Weights and KV are read at the speed of memory, and with pages of 4 KiB much of the time goes into
finding the pages. Called by kernels/quantised_linear.py and the runner's KV pool.
"""

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20
_ALIGN = 64


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeros that take no memory until they are touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: plain pages, only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Arena:
    """Hands out memory that is never given back alone: a piece of `chunk` bytes or more lives as
    long as any tensor of it.
    """

    def __init__(self, chunk: int = 32 << 20) -> None:
        self._chunk = -(-chunk // _HUGE_PAGE) * _HUGE_PAGE
        self._memory: mmap.mmap | None = None
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] of `dtype`, zeros, aligned to a cache line."""
        num_bytes = count * dtype.itemsize
        if self._memory is None or self._used + num_bytes > len(self._memory):
            self._memory, self._used = map_memory(max(self._chunk, num_bytes)), 0
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return tensor
