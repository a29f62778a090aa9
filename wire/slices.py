"""Short time slices for threads that pass tokens on.

Text processes need a core for a tenth of a millisecond a token, while the model's threads keep all
cores busy. With slices of the usual length each hop of a token may wait for the end of one of
theirs, some 4 ms; a thread that asks for short ones is let in when it wakes. Linux 6.12 and later;
elsewhere nothing changes. Called by the children before they start threads.
"""

import ctypes
import os
import platform
import sys

_SHORTEST_NS = 100_000  # the kernel takes no shorter ones
_KERNELS_CHOICE = 0
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr, first version; policy 0 is SCHED_OTHER, whose slice is `runtime`."""

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
    """For this thread and those that it will start."""
    _set_slice(_SHORTEST_NS)


def ask_for_usual_slices() -> None:
    """The same, for threads that compute."""
    _set_slice(_KERNELS_CHOICE)


def _set_slice(nanoseconds: int) -> None:
    call = _SET_ATTRIBUTES.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _Attributes(size=ctypes.sizeof(_Attributes), nice=nice, runtime=nanoseconds)
    # An older kernel ignores the length; a refusal leaves all as it was.
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)
