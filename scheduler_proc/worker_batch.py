"""ModelWorkerBatch down, BatchResult up: the only values that core and runner share. PURE.

Positions count from 0 over prompt and answer. The slot of position p in row r is
`page_table[r][p // page_size] * page_size + p % page_size`; page 0 is padding. The runner keeps its
own copy of the page table and of each row's sampler state, and learns of changes from here alone.
Steps are computed in the order of their launches, of which two may await that core sees the result.
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
    """A request takes a row: the sampler's state starts from these ids, also after a retraction."""

    row: int
    sampling: SamplingParams  # seed is set, max_new_tokens resolved
    prompt_ids: "array[int]"
    output_ids: "array[int]"  # generated before a retraction; usually empty
    banned_ids: tuple[int, ...]  # ids that may not be sampled before min_new_tokens


@dataclass(slots=True, frozen=True)
class ModelWorkerBatch:
    """One step. Columns run over the rows of the batch; the first `num_decodes` are decodes.

    Row i computes `extend_lens[i]` tokens at positions `prefix_lens[i] ...`. A decode's token is
    what the runner itself sampled last for that row: core may not know it yet. `input_ids` holds
    those of the other rows. `samples[i]` says whether row i yields a token (all but inner chunks).
    `new_pages` holds (row, index in its page table, page) for every page newly given to a row.
    `lora_slots` is the adapter slot of each row, 0 for the base model; empty if all are. Slots are
    written before the step: (slot, lora_id) in `new_loras`, lora_id 0 to clear one.
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
    """Between steps: adapters to read from their files, and those that no step will name again."""

    loads: list[LoRARef]
    drops: list[int]  # lora_id


@dataclass(slots=True, frozen=True)
class BatchResult:
    """`next_ids[k]` belongs to the k-th sampling row of the batch, in batch order.

    -1: the row's logits were not finite, its request ends with an error. A step that has been
    launched already computes the row once more, from any id: that result is ignored.
    """

    step: int
    next_ids: list[int]


class LaunchedStep(Protocol):
    @property
    def how(self) -> str:
        """It runs, for the log; empty where there is one way."""
        ...

    def result(self) -> BatchResult:
        """Blocks until the step has been computed."""
        ...
