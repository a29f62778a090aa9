"""Measure the free memory and cores of this process, within its cgroup and affinity.

Called at start-up by the model runner and the loader. Decisions are in memory.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def available_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be allocated, in the system and under the tightest cgroup limit."""
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(cgroups)])


def physical_cores() -> int:
    """Number of cores that this process may run on; hyper-threads of a core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def cores_to_pin(threads: int) -> list[int]:
    """A logical CPU for each thread, or none unless there is a thread for every core.

    With fewer threads, another process could pin its own to the same cores.
    """
    if not hasattr(os, "sched_getaffinity") or threads != physical_cores():
        return []
    first = {_siblings(cpu): cpu for cpu in sorted(os.sched_getaffinity(0), reverse=True)}
    return sorted(first.values())


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return topology.read_text().strip() if topology.exists() else str(cpu)


def _cgroup_headrooms(cgroups: Path) -> Iterator[int]:
    for group in _own_cgroups(cgroups):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
        ):
            limit = _number(group / limit_name)
            usage = _number(group / usage_name)
            if limit is not None and usage is not None:
                yield max(limit - usage + _reclaimable(group), 0)


def _own_cgroups(cgroups: Path) -> Iterator[Path]:
    """Yield the cgroups of this process and all their ancestors: each may set a limit."""
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        group = root / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(root))


def _reclaimable(group: Path) -> int:
    """Bytes of page cache that count as used, but that the kernel frees under pressure."""
    stat = group / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    fields = dict(line.split(" ", 1) for line in lines)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
