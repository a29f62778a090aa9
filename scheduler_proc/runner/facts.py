"""What a runner is to the process around it: its facts, which never change, and what it does."""

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
    num_pages: int  # with the padding page 0
    dtype_name: str  # of the weights, as --dtype spells it
    max_running_requests: int
    max_loras: int
    on_device: bool  # steps are computed elsewhere, and the next one can be planned meanwhile


class Runner(Protocol):
    @property
    def facts(self) -> RunnerFacts: ...

    @property
    def loras(self) -> LoRAMemoryPool: ...

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep: ...

    def prepare(self) -> bool:
        """Nothing is to be computed: do something for later steps, for a few milliseconds at most.
        False if there is nothing to do.
        """
        ...
