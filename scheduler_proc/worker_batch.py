"""Values between core and runner: ModelWorkerBatch down, BatchResult up. PURE.

Positions count from 0 over prompt and answer. The slot of position p in row r is `page_table[r][p
// page_size] * page_size + p % page_size`; page 0 is padding. The runner keeps its own page table
and sampler state of each row, and updates them from these values alone. Steps are computed in
launch order; at most two are launched and not yet processed by core.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ..wire.messages import LoRARef
from ..wire.sampling import SamplingParams


class ForwardMode(Enum):
    DECODE = "decode"  # every row computes one token
    EXTEND = "extend"  # rows compute prompt pieces
    MIXED = "mixed"


@dataclass(slots=True, frozen=True)
class RowOpen:
    """A request gets a row; its sampler state starts from these ids, also after a retraction."""

    row: int
    sampling: SamplingParams  # seed is set, max_new_tokens resolved
    prompt_ids: "array[int]"
    output_ids: "array[int]"  # generated before a retraction; usually empty
    banned_ids: tuple[int, ...]  # ids that may not be sampled before min_new_tokens


@dataclass(slots=True, frozen=True)
class ModelWorkerBatch:
    """One step. Lists run over the rows of the batch; the first `num_decodes` rows are decodes.

    Row i computes `extend_lens[i]` tokens at positions `prefix_lens[i] ...`. A decode row's input
    is the id that the runner sampled last for it, which core may not know yet; `input_ids` holds
    the inputs of the other rows. `samples[i]` tells whether row i yields a token (all but inner
    chunks). `new_pages` holds (row, index in its page table, page) for every page newly given to a
    row. `lora_slots` is the adapter slot of each row, 0 for the base model; empty if all are 0.
    Before the step, each (slot, lora_id) in `new_loras` is loaded into its slot; lora_id 0 clears
    it.
    """

    step: int
    mode: ForwardMode
    num_decodes: int
    rows: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    samples: list[bool]
    input_ids: "array[int]"
    new_pages: list[tuple[int, int, int]]
    opened: list[RowOpen]
    lora_slots: list[int] = field(default_factory=list)
    new_loras: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class LoRAOrders:
    """Adapters to read from their files, and lora_ids to drop because no later step uses them."""

    loads: list[LoRARef]
    drops: list[int]  # lora_id


@dataclass(slots=True, frozen=True)
class BatchResult:
    """Sampled ids; `next_ids[k]` belongs to the k-th sampling row of the batch.

    -1: the row's logits were not finite, its request ends with an error. A step launched meanwhile
    computes the row once more from an arbitrary id; that result is ignored.
    """

    step: int
    next_ids: list[int]


class LaunchedStep(Protocol):
    @property
    def how(self) -> str:
        """How the step runs, for the log; empty if there is only one way."""
        ...

    def result(self) -> BatchResult:
        """Block until the step has been computed; return its result."""
        ...
