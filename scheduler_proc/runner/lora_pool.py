"""LoRAMemoryPool: the loaded adapters, and which of them each slot holds.

Owned by the model runner. One thread reads and checks files while steps run; an adapter counts as
loaded once `take_loaded` has returned it. A slot refers to the adapter's own memory, so writing one
here copies nothing. When to load, write and drop is decided in core.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ...model_files.errors import AdapterError
from ...wire.messages import LoRALoaded
from ..models.forward_batch import ResidentAdapter
from ..worker_batch import LoRAOrders

log = logging.getLogger(__name__)

AdapterReader = Callable[[Path], ResidentAdapter]  # reads a directory; raises AdapterError


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _run_on(cpus: set[int]) -> Callable[[], None]:
    """Make an initializer that undoes the CPU pinning inherited from the computing thread."""

    def unpin() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)

    return unpin


class LoRAMemoryPool:
    """`read` runs in the loader thread."""

    def __init__(self, num_slots: int, read: AdapterReader) -> None:
        self._read = read
        self._adapters: dict[int, ResidentAdapter] = {}
        self._slots: list[ResidentAdapter | None] = [None] * (num_slots + 1)  # slot 0: the base
        self._reader = ThreadPoolExecutor(
            1, thread_name_prefix="lora-loader", initializer=_run_on(_allowed_cpus())
        )
        self._reading: list[tuple[int, Future[ResidentAdapter]]] = []

    @property
    def loading(self) -> bool:
        return bool(self._reading)

    def follow(self, orders: LoRAOrders) -> None:
        for ref in orders.loads:
            self._reading.append((ref.lora_id, self._reader.submit(self._read, Path(ref.path))))
        for lora_id in orders.drops:
            gone = self._adapters.pop(lora_id)
            # The write that clears its slot comes only with the next step, so drop it here.
            self._slots = [None if adapter is gone else adapter for adapter in self._slots]

    def take_loaded(self) -> list[LoRALoaded]:
        """Take the outcomes of loads that ended since the last call."""
        ended = [(lora_id, future) for lora_id, future in self._reading if future.done()]
        self._reading = [one for one in self._reading if one not in ended]
        return [self._take_in(lora_id, future) for lora_id, future in ended]

    def write(self, slots: list[tuple[int, int]]) -> None:
        """Apply (slot, lora_id) writes; lora_id 0 clears the slot."""
        for slot, lora_id in slots:
            self._slots[slot] = self._adapters[lora_id] if lora_id else None

    def of(self, slots: list[int]) -> list[ResidentAdapter | None]:
        return [self._slots[slot] for slot in slots]

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _take_in(self, lora_id: int, future: "Future[ResidentAdapter]") -> LoRALoaded:
        try:
            adapter = future.result()
        except AdapterError as error:
            return LoRALoaded(lora_id, ok=False, message=str(error), status=400)
        except Exception:  # a bug of the reader, or no memory: fails this load, not the server
            log.exception("load %d of an adapter broke", lora_id)
            message = "the adapter could not be read; the server's log says more"
            return LoRALoaded(lora_id, ok=False, message=message, status=500)
        self._adapters[lora_id] = adapter
        return LoRALoaded(lora_id, ok=True, rank=adapter.rank)
