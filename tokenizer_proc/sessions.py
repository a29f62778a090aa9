"""SessionTable: one Session per request, with exactly one terminal reply each. PURE.

Owned and called by `front.Front` alone. The table decides; the front wakes readers and sends
AbortReqs. A rid stays in the table, and counts against `max_sessions`, until its terminal row from
the scheduler arrives, even if its client has left: that bounds the requests in flight behind the
front.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ..wire.messages import Finish, StrOut
from ..wire.tenant_shares import TenantShares
from .errors import IllegalMove, Refused
from .limits import MAX_UNREAD_CHARS, MAX_UNREAD_TOKENS, RETRY_AFTER_DRAINING


class SessionState(Enum):
    OPEN = "open"  # has a rid, nothing sent
    SUBMITTED = "submitted"  # sent to the scheduler
    STREAMING = "streaming"  # a row has arrived
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


_MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.OPEN: frozenset({SessionState.SUBMITTED, SessionState.FAILED}),
    SessionState.SUBMITTED: frozenset(
        {SessionState.STREAMING, SessionState.DONE, SessionState.ABORTED, SessionState.FAILED}
    ),
    SessionState.STREAMING: frozenset(
        {SessionState.DONE, SessionState.ABORTED, SessionState.FAILED}
    ),
    SessionState.DONE: frozenset(),
    SessionState.ABORTED: frozenset(),
    SessionState.FAILED: frozenset(),
}

_LIVE = (SessionState.SUBMITTED, SessionState.STREAMING)
_END_OF = {
    "stop": SessionState.DONE,
    "length": SessionState.DONE,
    "abort": SessionState.ABORTED,
    "error": SessionState.FAILED,
}

SLOW_READER = Finish(
    "error", None, "the client did not read its output in time; the request was aborted", 408
)


@dataclass(slots=True, eq=False)
class Session:
    rid: int
    prompt_tokens: int
    lora_id: int = 0
    tenant: str = ""
    state: SessionState = SessionState.OPEN
    delivered_tokens: int = 0
    replied: bool = False  # the terminal row was handed out, or the client has left
    story: list[str] = field(default_factory=list)
    unread: list[StrOut] = field(default_factory=list)
    unread_tokens: int = 0
    unread_chars: int = 0

    def move(self, to: SessionState, why: str) -> None:
        self.story.append(f"{self.state.value} -> {to.value}: {why}")
        if to not in _MOVES[self.state]:
            raise IllegalMove(f"session {self.rid}: " + "; ".join(self.story))
        self.state = to

    def take(self) -> StrOut | None:
        """Return the output since the last call, merged into one row; None if there is none."""
        rows = self.unread
        if not rows:
            return None
        self.delivered_tokens += self.unread_tokens
        self.replied = rows[-1].finish is not None
        merged = rows[0] if len(rows) == 1 else _merge(rows)
        self._clear()
        return merged

    def _add(self, row: StrOut) -> None:
        self.unread.append(row)
        self.unread_tokens += len(row.token_ids)
        self.unread_chars += len(row.text)

    def _clear(self) -> None:
        self.unread = []
        self.unread_tokens = self.unread_chars = 0


class Delivery(Enum):
    """What the front must do after a row."""

    WAKE = "wake the reader"
    CUT = "wake the reader and abort the request in the scheduler: it read too slowly"
    LATE = "nothing: nobody waits for this row"


class SessionTable:
    def __init__(self, max_sessions: int, left: Callable[[Session], None]) -> None:
        """Call `left` once for every session that leaves the table."""
        self._max_sessions = max_sessions
        self._shares = TenantShares(max_sessions)
        self._left = left
        self._by_rid: dict[int, Session] = {}
        self._last_rid = 0
        self.draining = False
        self.late_rows = 0

    def __len__(self) -> int:
        return len(self._by_rid)

    def open(self, prompt_tokens: int, lora_id: int = 0, tenant: str = "") -> Session:
        """Open a session with a new rid.

        Raises Refused when draining, when the table is full, and when the tenant holds its share.
        """
        if self.draining:
            raise Refused(503, "the server is shutting down", RETRY_AFTER_DRAINING)
        if len(self._by_rid) >= self._max_sessions:
            raise Refused(503, f"the server is busy: {self._max_sessions} requests are in flight")
        if not self._shares.may_add(tenant):
            raise Refused(
                503,
                f"the server is busy: {self._shares.held_by(tenant)} requests of this user are in "
                f"flight, the {self._max_sessions - len(self)} places left are kept for others",
            )
        self._last_rid += 1
        session = Session(self._last_rid, prompt_tokens, lora_id, tenant)
        self._shares.add(tenant)
        self._by_rid[session.rid] = session
        return session

    def submitted(self, session: Session) -> None:
        session.move(SessionState.SUBMITTED, "sent to the scheduler")

    def unsent(self, session: Session) -> None:
        """Remove a session whose request could not be sent to the scheduler."""
        session.move(SessionState.FAILED, "could not be sent")
        session.replied = True
        self._remove(session)

    def deliver(self, row: StrOut) -> Delivery:
        """Record one row from the detokenizer."""
        session = self._by_rid.get(row.rid)
        if session is None:
            self.late_rows += 1
            return Delivery.LATE
        if row.finish is not None:
            self._remove(session)
        if session.state not in _LIVE:
            if session.state is SessionState.OPEN:
                session.move(SessionState.STREAMING, "a row before the request was sent")
            self.late_rows += 1
            return Delivery.LATE
        return self._book(session, row)

    def _book(self, session: Session, row: StrOut) -> Delivery:
        session._add(row)
        if row.finish is not None:
            session.move(_END_OF[row.finish.reason], f"finish {row.finish.reason}")
            return Delivery.WAKE
        if session.state is SessionState.SUBMITTED:
            session.move(SessionState.STREAMING, "first row")
        if session.unread_tokens > MAX_UNREAD_TOKENS or session.unread_chars > MAX_UNREAD_CHARS:
            self._cut(session, SLOW_READER)
            return Delivery.CUT
        return Delivery.WAKE

    def _cut(self, session: Session, finish: Finish) -> None:
        session.move(SessionState.FAILED, finish.message)
        session._clear()
        session._add(StrOut(session.rid, "", (), finish))

    def close(self, session: Session) -> bool:
        """Close a session for its client; return True if the scheduler must abort the request."""
        session.replied = True
        session._clear()
        if session.state not in _LIVE:
            return False
        session.move(SessionState.ABORTED, "closed by its client")
        return True

    def fail_all(self, finish: Finish) -> list[Session]:
        """End all sessions with `finish`; return those whose readers must be woken."""
        left = [session for session in self._by_rid.values() if session.state in _LIVE]
        for session in left:
            self._cut(session, finish)
        for session in list(self._by_rid.values()):
            self._remove(session)
        return left

    def _remove(self, session: Session) -> None:
        del self._by_rid[session.rid]
        self._shares.add(session.tenant, -1)
        self._left(session)


def _merge(rows: list[StrOut]) -> StrOut:
    return StrOut(
        rid=rows[0].rid,
        text="".join(row.text for row in rows),
        token_ids=tuple(token_id for row in rows for token_id in row.token_ids),
        finish=rows[-1].finish,
        cached_tokens=max(row.cached_tokens for row in rows),
    )
