"""Text streams of all requests, from the first row to one terminal StrOut each. PURE.

Called by `server` with the rows of each step. A stream is OPEN until its text ends. The scheduler's
terminal row deletes it. A stop string or a failed decode ends it earlier: it tells the scheduler
and, ENDED, drops rows up to the terminal one. Sockets and tokenizers must not enter.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..wire.messages import AbortReq, Finish, StopMatched, StreamOpen, StrOut, TokenIDOut
from .incremental import IncrementalDecoder
from .stop_strings import StopMatcher

# (ids, skip_special_tokens) -> text
Decode = Callable[[Sequence[int], bool], str]
NO_SPECIAL: Mapping[int, str] = {}


@dataclass(slots=True)
class Outcome:
    """Output of one step: text rows, and messages to the scheduler."""

    rows: list[StrOut] = field(default_factory=list)
    to_scheduler: list[StopMatched | AbortReq] = field(default_factory=list)


class Streams:
    """Streams by rid, open or ended."""

    def __init__(self, decode: Decode, special: Mapping[int, str] = NO_SPECIAL) -> None:
        """`special`: id -> text of the tokens that `decode` can skip."""
        self._decode = decode
        self._special = special
        self._open: dict[int, _Stream] = {}
        self._ended: set[int] = set()
        self.unknown_rows = 0  # rows dropped: rid never opened, over, or opened twice

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def take(self, rows: Sequence[TokenIDOut]) -> Outcome:
        """Decode one step's rows. A row without text, ids and finish gives no StrOut."""
        outcome = Outcome()
        for row in rows:
            self._take(row, outcome)
        return outcome

    def _take(self, row: TokenIDOut, outcome: Outcome) -> None:
        if row.rid in self._ended:
            if row.finish is not None:
                self._ended.remove(row.rid)
            return
        try:
            if row.opened is not None and row.rid in self._open:
                self.unknown_rows += 1  # a stream is opened once
                return
            if row.opened is not None:
                self._open[row.rid] = _Stream(row.opened, self._decode, self._special)
            elif row.rid not in self._open:
                self.unknown_rows += 1
                return
            out = self._open[row.rid].take(row)
        except Exception as error:
            # An exception of the tokenizer must end only the request with these ids.
            message = f"the answer could not be turned into text: {error!r}"
            out = StrOut(row.rid, "", row.token_ids, Finish("error", message=message, status=500))
        if out.text or out.token_ids or out.finish is not None:
            outcome.rows.append(out)
        if out.finish is not None:
            self._close(row, out.finish, outcome)

    def _close(self, row: TokenIDOut, finish: Finish, outcome: Outcome) -> None:
        self._open.pop(row.rid, None)
        if row.finish is not None:
            return
        self._ended.add(row.rid)
        stopped = finish.reason == "stop"
        outcome.to_scheduler.append(StopMatched(row.rid) if stopped else AbortReq(row.rid))


class _Stream:
    """One request's text: passes ids through the decoder, then text through the stop matcher."""

    def __init__(self, opened: StreamOpen, decode: Decode, special: Mapping[int, str]) -> None:
        skip = opened.skip_special_tokens
        tail = array("i", opened.prompt_tail)
        self._decoder = IncrementalDecoder(lambda ids: decode(ids, skip), tail)
        # Hidden tokens whose text may match a stop string.
        self._hidden = special if skip and opened.stop else NO_SPECIAL
        self._matcher = StopMatcher(opened.stop, self._hidden.values())
        self._keep_stop = opened.no_stop_trim
        self._min_tokens = opened.min_new_tokens
        self._tokens = 0
        self._cached_tokens = 0

    def take(self, row: TokenIDOut) -> StrOut:
        """Decode a row up to the first stop string; drop the ids after it."""
        self._cached_tokens = max(self._cached_tokens, row.cached_tokens)
        parts: list[str] = []
        for count, token_id in enumerate(row.token_ids, start=1):
            stop = None
            if not self._is_trimmed_stop_token(row, count):
                self._tokens += 1
                text, stop = self._match(self._decoder.push([token_id]))
                parts.append(text)
            if stop is None and token_id in self._hidden:
                text, stop = self._match(self._hidden[token_id], shown=False)
                parts.append(text)
            if stop is not None:
                return self._stopped(row, parts, stop, row.token_ids[:count])
        if row.finish is not None:
            text, stop = self._match(self._decoder.flush())
            parts.append(text)
            if stop is not None:
                return self._stopped(row, parts, stop, row.token_ids)
            parts.append(self._matcher.flush())
        return self._out(row, "".join(parts), row.token_ids, row.finish)

    def _match(self, text: str, *, shown: bool = True) -> tuple[str, str | None]:
        """Push text to the matcher. Stop strings within the first `min_new_tokens` are ignored,
        as the sampler bans stop tokens there.
        """
        return self._matcher.push(text, shown=shown, may_end=self._tokens > self._min_tokens)

    def _is_trimmed_stop_token(self, row: TokenIDOut, count: int) -> bool:
        """Whether the `count`th id is the stop token that ended the answer and is not shown."""
        if row.finish is None or self._keep_stop or count < len(row.token_ids):
            return False
        return isinstance(row.finish.matched, int) and row.finish.matched == row.token_ids[-1]

    def _stopped(
        self, row: TokenIDOut, parts: list[str], stop: str, token_ids: tuple[int, ...]
    ) -> StrOut:
        """Finish with a stop string, unless the row itself finishes with an abort or error."""
        if self._keep_stop:
            parts.append(stop)
        finish = Finish("stop", matched=stop)
        if row.finish is not None and row.finish.reason in ("abort", "error"):
            finish = row.finish
        return self._out(row, "".join(parts), token_ids, finish)

    def _out(
        self, row: TokenIDOut, text: str, token_ids: tuple[int, ...], finish: Finish | None
    ) -> StrOut:
        return StrOut(row.rid, text, token_ids, finish, self._cached_tokens)
