"""Req: one request in the scheduler, its state machine, and what it holds of the KV pool.

Owned by core/scheduler.py; nothing outside core ever sees one. PURE.
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
    EXTENDING = "extending"  # prompt pieces are being computed
    DECODING = "decoding"
    ABORTING = "aborting"  # unwanted, but a launched batch still writes its pages
    FINISHED = "finished"


_MOVES: dict[ReqState, frozenset[ReqState]] = {
    ReqState.WAITING: frozenset({ReqState.EXTENDING, ReqState.FINISHED}),
    ReqState.EXTENDING: frozenset(
        {ReqState.DECODING, ReqState.WAITING, ReqState.ABORTING, ReqState.FINISHED}
    ),
    ReqState.DECODING: frozenset({ReqState.WAITING, ReqState.ABORTING, ReqState.FINISHED}),
    ReqState.ABORTING: frozenset({ReqState.FINISHED}),
    ReqState.FINISHED: frozenset(),
}
_STORY_LENGTH = 16


class IllegalMove(RuntimeError):
    """A bug: a request was moved where its state does not lead. Carries its recent story."""


@dataclass(slots=True, eq=False)
class ReqKV:
    """What a running request holds. The one place that says which of its pages are whose.

    pages[:tree_pages] belong to the prefix tree and are locked through `node`;
    pages[tree_pages:] belong to the request. Tokens [0, computed) have their KV in place.
    """

    row: int
    pages: list[int]
    tree_pages: int
    node: TreeNode
    computed: int


@dataclass(slots=True, eq=False)
class Req:
    """`ids` is prompt and answer; the answer's last token has no KV until it has been an input."""

    rid: int
    arrival: int  # logical tick; kept through retractions
    sampling: SamplingParams
    ids: "array[int]"
    prompt_len: int
    max_new_tokens: int  # resolved, and small enough for context and pool
    stop_ids: frozenset[int]  # end of text and the request's own stop tokens
    state: ReqState = ReqState.WAITING
    priority: int = 0  # larger first; intake has turned the sign where smaller goes first
    kv: ReqKV | None = None
    match: Match | None = None  # last look into the tree, valid for one version of it
    cached_tokens: int = 0  # prompt tokens found in the tree at the first admission
    retractions: int = 0
    failed_allocations: int = 0
    admitted: bool = False  # ever
    announced: bool = False  # the detokenizer knows of it
    tenant: str = ""
    namespace: str = ""  # cached prefixes are shared within one only
    lora_id: int = 0  # the adapter; 0: the base model
    arrived_at: int = 0  # tokens that the server had computed by then: a clock without time
    skips: int = 0  # that started past it when it did not fit
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

    def move(self, state: ReqState, why: str) -> None:
        self.story.append(f"{self.state.value} -> {state.value}: {why}")
        if state not in _MOVES[self.state]:
            story = "; ".join(self.story)
            raise IllegalMove(f"request {self.rid} cannot do that. Its story: {story}")
        self.state = state

    def finish_for(self, token_id: int) -> Finish | None:
        """Does the answer end with `token_id`, which has just been appended?"""
        if token_id in self.stop_ids:
            return Finish("stop", matched=token_id)
        if self.tokens_left <= 0:
            return Finish("length")
        return None
