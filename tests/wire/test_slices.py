"""Short time slices: asked for by a thread, for itself, without touching anything else."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom.wire.slices import ask_for_short_slices, ask_for_usual_slices


def slice_ns(before: Callable[[], None]) -> int | None:
    """Of a thread that has done `before`; None where the kernel does not say."""

    def run() -> int | None:
        before()
        path = Path(f"/proc/self/task/{threading.get_native_id()}/sched")
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.rpartition(":")[2] for line in lines if line.startswith("se.slice")]
        return int(found[0]) if found else None

    with ThreadPoolExecutor(1) as thread:  # this one keeps its own
        return thread.submit(run).result()


def test_a_thread_gets_short_slices_and_its_own_back() -> None:
    usual = slice_ns(lambda: None)
    if usual is None:
        pytest.skip("this kernel does not show slices")

    def there_and_back() -> None:
        ask_for_short_slices()
        ask_for_usual_slices()

    release = os.uname().release.split(".")
    knows_slices = (int(release[0]), int(release[1])) >= (6, 12)
    assert slice_ns(ask_for_short_slices) == (100_000 if knows_slices else usual)
    assert slice_ns(there_and_back) == usual
    assert slice_ns(lambda: None) == usual


def test_policy_and_niceness_stay() -> None:
    def run() -> tuple[int, int]:
        ask_for_short_slices()
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == before
