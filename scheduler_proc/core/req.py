"""Req: one request in the scheduler, its state machine, and its row and pages of the KV pool.

Owned by core/scheduler.py; never leaves core. PURE.

    WAITING -> EXTENDING -> DECODING     admitted; the last chunk of its prompt is launched
    EXTENDING, DECODING -> WAITING       retracted, only while in no launched step
    any -> FINISHED                      ended while in no launched step
    EXTENDING, DECODING -> ENDING        ended while in a launched step; the client is told at once
    ENDING -> FINISHED                   the last launched step with it has landed

A request holds a row and pages exactly in EXTENDING, DECODING and ENDING, and ends once.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ...wire.messages import Finish
from ...wire.sampling import SamplingParams
from .radix_cache import Match, TreeNode


class ReqState(Enum):
    WAITING = "waiting"  # holds nothing of the pool
    EXTENDING = "extending"  # part of its prompt has not been launched yet
    DECODING = "decoding"
    ENDING = "ending"  # its end has been sent, but a launched step still uses its pages
    FINISHED = "finished"


_MOVES: dict[ReqState, frozenset[ReqState]] = {
    ReqState.WAITING: frozenset({ReqState.EXTENDING, ReqState.FINISHED}),
    ReqState.EXTENDING: frozenset(
        {ReqState.DECODING, ReqState.WAITING, ReqState.ENDING, ReqState.FINISHED}
    ),
    ReqState.DECODING: frozenset({ReqState.WAITING, ReqState.ENDING, ReqState.FINISHED}),
    ReqState.ENDING: frozenset({ReqState.FINISHED}),
    ReqState.FINISHED: frozenset(),
}
_STORY_LENGTH = 16


class IllegalMove(RuntimeError):
    """A bug: a state change that `_MOVES` forbids. The message lists the last changes."""


@dataclass(slots=True, eq=False)
class ReqKV:
    """The row and pages of a running request, and how far they are computed, in tokens.

    pages[:tree_pages] belong to the prefix tree and are locked through `node`;
    pages[tree_pages:] belong to the request. The KV of tokens [0, computed) is written or will be
    by launched steps; the results of the steps of tokens [0, landed) have been processed.
    """

    row: int
    pages: list[int]
    tree_pages: int
    node: TreeNode
    computed: int
    landed: int
    sound: bool = True  # False after a non-finite result: commit no more pages to the tree

    @property
    def in_flight(self) -> bool:
        """Whether a launched step uses the pages."""
        return self.landed < self.computed


@dataclass(slots=True, eq=False)
class Req:
    """`ids` is prompt and answer; a generated token has no KV until it has been a step's input."""

    rid: int
    arrival: int  # logical tick; kept through retractions
    sampling: SamplingParams
    ids: "array[int]"
    prompt_len: int
    max_new_tokens: int  # lowered by intake to what context and pool allow
    stop_ids: frozenset[int]  # end-of-text ids, unless ignored, and the request's own stop ids
    state: ReqState = ReqState.WAITING
    priority: int = 0  # larger first; the scheduler negates it under low_priority_first
    kv: ReqKV | None = None
    match: Match | None = None  # last lookup in the prefix tree; check is_fresh before use
    cached_tokens: int = 0  # prompt tokens found in the tree at the first admission
    retractions: int = 0
    failed_allocations: int = 0
    admitted: bool = False  # at least once
    announced: bool = False  # a row with its StreamOpen has been made for the detokenizer
    tenant: str = ""
    namespace: str = ""  # cached prefixes are shared only within a namespace
    lora_id: int = 0  # the adapter; 0: the base model
    arrived_at: int = 0  # tokens that the server had computed when it arrived
    skips: int = 0  # requests started past it when it did not fit the pool
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY_LENGTH))

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def tokens_left(self) -> int:
        return self.max_new_tokens - self.output_len

    @property
    def holds_pages(self) -> bool:
        return self.kv is not None

    @property
    def in_flight(self) -> bool:
        return self.kv is not None and self.kv.in_flight

    @property
    def goes_on_decoding(self) -> bool:
        """Whether it decodes and the launched steps do not bring it to max_new_tokens."""
        kv = self.kv
        return (
            self.state is ReqState.DECODING
            and kv is not None
            and kv.computed < self.prompt_len + self.max_new_tokens - 1
        )

    def move(self, state: ReqState, why: str) -> None:
        self.story.append(f"{self.state.value} -> {state.value}: {why}")
        if state not in _MOVES[self.state]:
            story = "; ".join(self.story)
            raise IllegalMove(f"request {self.rid} cannot do that. Its story: {story}")
        self.state = state

    def finish_for(self, token_id: int) -> Finish | None:
        """The Finish if the answer ends with `token_id`, which was just appended; else None."""
        if token_id in self.stop_ids:
            return Finish("stop", matched=token_id)
        if self.tokens_left <= 0:
            return Finish("length")
        return None
