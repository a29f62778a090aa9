"""Prefault: populates the KV pool's memory in idle moments, shortly before it is used.

The kernel finds and zeroes a page of memory at its first touch, and a virtual machine may have to
ask its host for it, which would lengthen the step that touches it. So memory is populated ahead of
the highest KV page in use: enough to cover the busy time between two idle moments, and little
enough that an idle server stays small. Owned by ModelRunner; does nothing outside Linux and on
kernels before 5.14.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Sequence

import torch

AHEAD_BYTES = 256 << 20  # over all buffers
_CHUNK = 2 << 20  # bytes per call: a huge page
_MADV_POPULATE_WRITE = 23

logger = logging.getLogger(__name__)


class Prefault:
    def __init__(self, buffers: Sequence[torch.Tensor], num_pages: int) -> None:
        """`buffers` have equal sizes and hold `num_pages` pages each, contiguous and in order."""
        self._buffers = buffers
        self._size = buffers[0].nbytes
        self._page_bytes = self._size // num_pages
        self._wanted = 0  # bytes per buffer to populate
        self._ready = 0 if sys.platform == "linux" else self._size  # bytes populated per buffer
        self._next = 0  # index of the next buffer to populate from `_ready` on
        self.reach(0)

    def reach(self, page: int) -> None:
        """Note that pages up to this one are in use."""
        ahead = AHEAD_BYTES // len(self._buffers)
        wanted = min(self._size, (page + 1) * self._page_bytes + ahead)
        self._wanted = max(self._wanted, wanted)

    def step(self) -> bool:
        """Populate one chunk, in tenths of a millisecond, or a few milliseconds in a virtual
        machine. False if nothing is left to do.
        """
        if self._ready >= self._wanted:
            return False
        num_bytes = min(_CHUNK, self._size - self._ready)
        error = _populate(self._buffers[self._next].data_ptr() + self._ready, num_bytes)
        if error:
            logger.info("KV memory is not made ready ahead: %s", os.strerror(error))
            self._ready = self._size
            return False
        self._next += 1
        if self._next == len(self._buffers):
            self._next, self._ready = 0, self._ready + num_bytes
        return True


def _populate(address: int, num_bytes: int) -> int:
    """Populate memory for writing; return 0 or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done: int = libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE)
    return 0 if done == 0 else ctypes.get_errno()
