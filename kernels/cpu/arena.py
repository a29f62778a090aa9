"""Memory in huge pages, where the system has them, for weights and KV.

A step reads both at memory speed, and with 4 KiB pages much of that time goes into address
translation. Called by the packing code (kernels/, models/packed.py) and the runner's KV pool.
"""

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20
_ALIGN = 64


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` zero bytes, which take no memory until they are touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without support plain pages only cost speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Arena:
    """An allocator for tensors that live equally long.

    Memory is mapped in chunks of at least `chunk` bytes; a chunk lives as long as any tensor in it.
    """

    def __init__(self, chunk: int = 32 << 20) -> None:
        self._chunk = -(-chunk // _HUGE_PAGE) * _HUGE_PAGE
        self._memory: mmap.mmap | None = None
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed tensor [count] of `dtype`, aligned to a cache line."""
        num_bytes = count * dtype.itemsize
        if self._memory is None or self._used + num_bytes > len(self._memory):
            self._memory, self._used = map_memory(max(self._chunk, num_bytes)), 0
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        self._used = -(-(self._used + num_bytes) // _ALIGN) * _ALIGN
        return tensor
