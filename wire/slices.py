"""Short scheduler time slices for the threads that pass tokens on.

Those threads need a core for about 0.1 ms per token while the model's threads keep all cores busy.
With the usual slice length each hop of a token may wait some 4 ms for a slice to end; a thread with
short slices is scheduled when it wakes. Needs Linux 6.12; elsewhere nothing changes. Children call
it before they start threads.
"""

import ctypes
import os
import platform
import sys

_SHORTEST_NS = 100_000  # the kernel takes no shorter ones
_KERNELS_CHOICE = 0
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr, version 0; policy 0 is SCHED_OTHER, whose slice is `runtime`, in ns."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def ask_for_short_slices() -> None:
    """Shorten the slices of this thread and of those that it starts later."""
    _set_slice(_SHORTEST_NS)


def ask_for_usual_slices() -> None:
    """Restore the default slices for this thread and its later ones, which compute."""
    _set_slice(_KERNELS_CHOICE)


def _set_slice(nanoseconds: int) -> None:
    call = _SET_ATTRIBUTES.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _Attributes(size=ctypes.sizeof(_Attributes), nice=nice, runtime=nanoseconds)
    # An older kernel ignores the length; if it refuses the call, nothing changes.
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)
