"""Prefault: memory of the KV pool is made ready shortly before it is used, in idle moments.

Memory that nobody has touched must be found and zeroed at the first touch, a virtual machine may
have to ask its host for it, and all that would be a part of the step that comes to it first. So it
is asked for ahead of the highest page in use: by so much that busy times between two idle moments
are covered, and by so little that an idle server stays small. Owned by ModelRunner; Linux only,
elsewhere and on kernels before 5.14 it does nothing.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Sequence

import torch

AHEAD_BYTES = 256 << 20  # of the whole pool
_CHUNK = 2 << 20  # of one buffer: a huge page
_MADV_POPULATE_WRITE = 23

logger = logging.getLogger(__name__)


class Prefault:
    def __init__(self, buffers: Sequence[torch.Tensor], num_pages: int) -> None:
        """Of each buffer the pages follow one another; all buffers have as many, of one size."""
        self._buffers = buffers
        self._size = buffers[0].nbytes
        self._page_bytes = self._size // num_pages
        self._wanted = 0  # bytes of each buffer, as all that follows
        self._ready = 0 if sys.platform == "linux" else self._size
        self._next = 0  # buffer, of which the chunk from `_ready` on is not ready yet
        self.reach(0)

    def reach(self, page: int) -> None:
        """Pages up to this one are in use."""
        ahead = AHEAD_BYTES // len(self._buffers)
        wanted = min(self._size, (page + 1) * self._page_bytes + ahead)
        self._wanted = max(self._wanted, wanted)

    def step(self) -> bool:
        """Make a little more ready: tenths of a millisecond, in a virtual machine a few. False if
        nothing is to be done.
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
    """0, or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done: int = libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE)
    return 0 if done == 0 else ctypes.get_errno()
