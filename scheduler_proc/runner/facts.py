"""Runner: the interface of a runner to the event loop, and RunnerFacts, which never change."""

from dataclasses import dataclass
from typing import Protocol

from ..worker_batch import LaunchedStep, ModelWorkerBatch
from .lora_pool import LoRAMemoryPool


@dataclass(slots=True, frozen=True)
class RunnerFacts:
    vocab_size: int  # ids that the tokenizer knows; the logits may be wider
    context_length: int
    page_size: int
    max_total_tokens: int
    num_pages: int  # including the padding page 0
    dtype_name: str  # of the weights, as --dtype spells it
    max_running_requests: int
    max_loras: int
    on_device: bool  # steps run on a device, so that the next one can be planned meanwhile


class Runner(Protocol):
    @property
    def facts(self) -> RunnerFacts: ...

    @property
    def loras(self) -> LoRAMemoryPool: ...

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep: ...

    def prepare(self) -> bool:
        """Prepare for later steps while idle, for a few milliseconds at most; False if there is
        nothing to do.
        """
        ...
