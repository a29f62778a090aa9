"""CudaGraphRunner: decode steps captured once for a ladder of batch sizes, and replayed padded.

Owned by the device runner. The device (device.py) captures and replays; this decides which graph
serves a step, and gives the reason where none does.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..worker_batch import ForwardMode, ModelWorkerBatch
from .device import Device, Graph

log = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    size: int  # requests
    lora: bool


class Choice(NamedTuple):
    key: GraphKey | None
    reason: str  # why the step runs eagerly, or the graph's name


Forward = Callable[[GraphKey], torch.Tensor]  # logits [size, vocab] of the step in the buffers


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: padding adds at most a quarter, or three rows."""
    spans = ((1, 4, 1), (4, 32, 4), (32, 64, 8), (64, 128, 16), (128, largest, 32))
    steps = chain.from_iterable(range(*span) for span in spans)
    return sorted({size for size in steps if size < largest} | {largest}) if largest else []


class CudaGraphRunner:
    def __init__(self, device: Device, sizes: list[int], *, with_lora: bool) -> None:
        """`sizes` ascending; empty: every step runs eagerly."""
        self._device = device
        self._sizes = sizes
        self._with_lora = with_lora
        self._stream = device.capture_stream()  # one for all: these graphs are freed together
        self._graphs: dict[GraphKey, Graph] = {}

    def keys(self) -> list[GraphKey]:
        """Keys to capture, largest first: the smaller ones then reuse the memory of the largest."""
        kinds = (True, False) if self._with_lora else (False,)
        return [GraphKey(size, lora) for size in reversed(self._sizes) for lora in kinds]

    def capture(self, prepare: Callable[[GraphKey], None], forward: Forward) -> None:
        """Capture every key. The buffers that `forward` reads must keep their addresses.

        `prepare` fills them with a step that can be computed.
        """
        for key in tqdm(self.keys(), desc="graphs", leave=False, disable=None):
            prepare(key)
            self._graphs[key] = self._device.capture(partial(forward, key), self._stream)
        if self._graphs:
            log.info("captured %d graphs, for up to %d rows", len(self._graphs), self._sizes[-1])

    def choose(self, batch: ModelWorkerBatch) -> Choice:
        """Choose the smallest graph that holds the step, or none, with the reason."""
        if batch.mode is not ForwardMode.DECODE:
            return Choice(None, f"eager: {batch.mode.value}")
        if not self._sizes:
            return Choice(None, "eager: graphs are off")
        place = bisect_left(self._sizes, len(batch.rows))
        if place == len(self._sizes):
            return Choice(None, f"eager: {len(batch.rows)} rows, graphs hold {self._sizes[-1]}")
        key = GraphKey(self._sizes[place], bool(batch.lora_slots))
        return Choice(key, f"graph {key.size}{' lora' if key.lora else ''}")

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Replay a graph; return logits [key.size, vocab], valid until the next replay."""
        graph = self._graphs[key]
        graph.replay()
        return graph.output
