"""Req: one request in the scheduler, its state machine, and what it holds of the KV pool.

Owned by core/scheduler.py; nothing outside core ever sees one. PURE.

    WAITING -> EXTENDING -> DECODING     admitted; the last piece of its prompt is launched
    EXTENDING, DECODING -> WAITING       retracted: only while no launched step holds it
    any -> FINISHED                      it ends while no launched step holds it
    EXTENDING, DECODING -> ENDING        it ends while one does: told at once, takes part no more
    ENDING -> FINISHED                   the last step that holds it has landed

A row and pages are held exactly in EXTENDING, DECODING and ENDING. The client is told one end.
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
    EXTENDING = "extending"  # a part of its prompt has not been launched yet
    DECODING = "decoding"
    ENDING = "ending"  # its client has been told the end, but a launched step holds its pages
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
    """A bug: a request was moved where its state does not lead. Carries its recent story."""


@dataclass(slots=True, eq=False)
class ReqKV:
    """What a running request holds. The one place that says which of its pages are whose.

    pages[:tree_pages] belong to the prefix tree and are locked through `node`;
    pages[tree_pages:] belong to the request. Tokens [0, computed) have their KV in place or will
    have it by steps that are launched; of these, the steps of tokens [0, landed) have been read.
    """

    row: int
    pages: list[int]
    tree_pages: int
    node: TreeNode
    computed: int
    landed: int
    sound: bool = True  # False: the model failed on it, the tree gets no more of it

    @property
    def in_flight(self) -> bool:
        """A launched step reads and writes the pages."""
        return self.landed < self.computed


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

    @property
    def in_flight(self) -> bool:
        return self.kv is not None and self.kv.in_flight

    @property
    def goes_on_decoding(self) -> bool:
        """The launched steps bring no end that could be known."""
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
        """Does the answer end with `token_id`, which has just been appended?"""
        if token_id in self.stop_ids:
            return Finish("stop", matched=token_id)
        if self.tokens_left <= 0:
            return Finish("length")
        return None
