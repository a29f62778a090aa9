"""What times work on a device: marks in its stream, and a Device that marks every step.

Used by all sections. Nothing here waits but `seconds`. On a device that computes at once, as the
stand-in of the tests does, a mark is the time of the clock.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from ...scheduler_proc.runner.device import Device, Graph, Read, Wait

Mark = Any  # a moment of the device, of the timer that made it


class Timer(Protocol):
    def mark(self) -> Mark:
        """Mark the moment at which all work launched so far is done."""
        ...

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks; waits for the later one."""
        ...


class HostTimer:
    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)


class CudaTimer:
    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def waits_noted(device: str) -> Iterator[list[str]]:
    """Collects what in here waits for the device; torch tells that of CUDA devices alone."""
    found: list[str] = []
    if not device.startswith("cuda"):
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode(before)
    found += [str(one.message) for one in caught if "synchronizing" in str(one.message)]


@dataclass(frozen=True)
class Rig:
    device: Device
    timer: Timer

    @cached_property
    def _capture_stream(self) -> int:
        """The stream of all timed graphs, of which one exists at a time."""
        return self.device.capture_stream()

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return seconds per `run` over `repeats` launched in a row, after a warm-up."""
        run()
        start = self.timer.mark()
        for _ in range(repeats):
            run()
        return self.timer.seconds(start, self.timer.mark()) / repeats

    def captured_seconds(self, run: Callable[[], torch.Tensor], repeats: int = 10) -> float:
        """Return seconds per replay of a captured graph of `run`, free of launch cost."""
        graph = self.device.capture(run, self._capture_stream)
        return self.seconds(graph.replay, repeats)


@dataclass
class TimedDevice:
    """A Device that marks where each step of a runner begins and ends.

    A step begins with the upload of its numbers and ends with what is downloaded.
    """

    device: Device
    timer: Timer
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)
    name: str = field(init=False)
    _begun: Mark = None

    def __post_init__(self) -> None:
        self.name = self.device.name

    def host_buffer(self, size: int) -> torch.Tensor:
        return self.device.host_buffer(size)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        self._begun = self.timer.mark()
        return self.device.upload(target, source)

    def download(self, source: torch.Tensor) -> Read:
        read = self.device.download(source)
        if self._begun is not None:  # else no step has begun: the runner warms up
            self.spans.append((self._begun, self.timer.mark()))
        return read

    def beside(self, work: Callable[[], None]) -> None:
        self.device.beside(work)

    def capture_stream(self) -> int:
        return self.device.capture_stream()

    def capture(self, run: Callable[[], torch.Tensor], stream: int) -> Graph:
        return self.device.capture(run, stream)

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return self.device.peak_bytes(run)

    def take_spans(self) -> list[tuple[Mark, Mark]]:
        """Return (begin, end) of each step since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def take_seconds(self) -> list[float]:
        return [self.timer.seconds(*span) for span in self.take_spans()]
