"""Description of this machine, and the processor time that other processes took.

Called by `peers`. Reads counters of the operating system; starts and stops nothing.
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, str | int]:
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class CpuShares:
    """Shares of all cores' time: the engine with its children, this process, all others."""

    engine: float
    harness: float
    foreign: float


class CpuMeter:
    """Processor shares since it was made; time stolen from a guest counts as foreign."""

    def __init__(self, engine_pid: int | None) -> None:
        """Take the root process of the engine; None if there is no engine."""
        self._pid = engine_pid
        self._start = time.monotonic()
        self._busy, self._engine, self._own = self._now()

    def read(self) -> CpuShares:
        busy, engine, own = self._now()
        whole = max(time.monotonic() - self._start, 1e-9) * (psutil.cpu_count() or 1)
        engine_share = max(engine - self._engine, 0.0) / whole
        own_share = (own - self._own) / whole
        foreign = (busy - self._busy) / whole - engine_share - own_share
        # The counters tick in hundredths of a second.
        return CpuShares(engine_share, own_share, max(foreign, 0.0))

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time already.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        engine = 0.0 if self._pid is None else _tree_seconds(self._pid)
        return sum(times) - idle - guests, engine, time.process_time()


def _tree_seconds(pid: int) -> float:
    """Return processor seconds of a process and its descendants, reaped ones included."""
    total = 0.0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in processes:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
        total += getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
    return total
