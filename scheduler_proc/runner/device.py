"""Device: buffers, copies with events, captured graphs and free memory of a CUDA device.

CudaDevice is the only code that names streams and graphs. Tests run everything above it on a
stand-in that computes at once and replays a graph by calling its function.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

Wait = Callable[[], None]  # blocks until an upload has been read
Read = Callable[[], torch.Tensor]  # blocks until a copy has arrived, and returns it


class Graph(Protocol):
    """A captured function of static buffers. `output` is overwritten by each replay."""

    @property
    def output(self) -> torch.Tensor: ...

    def replay(self) -> None: ...


class Device(Protocol):
    name: str  # as torch spells it

    def host_buffer(self, size: int) -> torch.Tensor:
        """[size] int32 in memory from which the device can copy asynchronously (pinned)."""
        ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        """Copy ahead of all later launches; `source` may change after the wait."""
        ...

    def download(self, source: torch.Tensor) -> Read:
        """Copy the result of earlier launches in `source` while later ones run."""
        ...

    def beside(self, work: Callable[[], None]) -> None:
        """Run copies while earlier steps run; later steps wait for them."""
        ...

    def capture_stream(self) -> int:
        """Make a stream for the captures of one owner, and return its number.

        Graphs captured over one stream share its library workspace, and freeing one of them may
        free the workspace. So graphs that are freed at different times need different streams.
        """
        ...

    def capture(self, run: Callable[[], torch.Tensor], stream: int) -> Graph:
        """Capture `run` over the stream of that number."""
        ...

    def free_bytes(self) -> int: ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Peak memory of `run` in bytes, beyond what was allocated before it."""
        ...


class CudaDevice:
    """One CUDA device. All graphs share one memory pool: they are never replayed side by side."""

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        torch.cuda.set_device(index)
        self._copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._capture_streams: list[torch.cuda.Stream] = []
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Wait:
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done.synchronize

    def download(self, source: torch.Tensor) -> Read:
        source = source.clone()  # a copy that the next step does not overwrite
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            target.copy_(source, non_blocking=True)
            arrived.record()
        source.record_stream(self._copies)

        def read() -> torch.Tensor:
            arrived.synchronize()
            return target

        return read

    def beside(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._copies):
            work()
        torch.cuda.current_stream().wait_stream(self._copies)

    def capture_stream(self) -> int:
        self._capture_streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return len(self._capture_streams) - 1

    def capture(self, run: Callable[[], torch.Tensor], stream: int) -> "CudaGraph":
        if not self._graphs:  # torch captures no graph into a pool whose graphs were all freed
            self._pool = torch.cuda.graph_pool_handle()
        graph = CudaGraph(run, self._pool, self._capture_streams[stream])
        self._graphs.add(graph)
        return graph

    def free_bytes(self) -> int:
        """Free bytes of the device, after torch's cache is released."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class CudaGraph:
    """A captured graph, with the output that each replay overwrites.

    `run` runs twice on the capture's stream first, because kernels are compiled and cuBLAS makes
    the stream's workspace (32 MiB) at their first use: a workspace made within a capture would lie
    in the graphs' memory. Torch 2.13 and later free the stream's workspace when a graph is reset;
    another graph of that stream that is still replayed would then write into freed memory.
    """

    def __init__(
        self,
        run: Callable[[], torch.Tensor],
        pool: Any,  # noqa: ANN401
        stream: torch.cuda.Stream,
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self.output = run()

    def replay(self) -> None:
        self._graph.replay()
