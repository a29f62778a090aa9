"""A device that is the CPU: it computes at once, and replays a graph by calling its function.

What a real one would leave undefined is poisoned: buffers that a replay must not read, and outputs
that a replay overwrites.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenloom.scheduler_proc.runner.device import Read, Wait


@dataclass
class FakeGraph:
    run: Callable[[], torch.Tensor]
    output: torch.Tensor
    stream: int
    replays: int = 0

    def replay(self) -> None:
        self.output.fill_(torch.nan)
        assert self.run().data_ptr() == self.output.data_ptr(), "a graph writes in one place"
        self.replays += 1


@dataclass
class FakeDevice:
    name: str = "cpu"
    free: int = 1 << 24
    graphs: list[FakeGraph] = field(default_factory=list)
    capture_streams: int = 0

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), -7777, dtype=torch.int32)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        target.copy_(source)
        return lambda: None

    def download(self, source: torch.Tensor) -> Read:
        copy = source.clone()
        return lambda: copy

    def beside(self, work: Callable[[], None]) -> None:
        work()

    def capture_stream(self) -> int:
        self.capture_streams += 1
        return self.capture_streams - 1

    def capture(self, run: Callable[[], torch.Tensor], stream: int) -> FakeGraph:
        assert 0 <= stream < self.capture_streams
        self.graphs.append(FakeGraph(run, run(), stream))
        return self.graphs[-1]

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 0
