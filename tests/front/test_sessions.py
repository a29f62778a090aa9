"""The session table: its moves, bounds, and one terminal reply per rid whatever the order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.tokenizer_proc.limits import MAX_UNREAD_CHARS, MAX_UNREAD_TOKENS
from tokenloom.tokenizer_proc.sessions import (
    Delivery,
    IllegalMove,
    Refused,
    Session,
    SessionState,
    SessionTable,
)
from tokenloom.wire.messages import Finish, StrOut


def nobody(_: Session) -> None:
    """For tables whose sessions nobody counts."""


def submitted(table: SessionTable) -> Session:
    session = table.open(3)
    table.submitted(session)
    return session


def test_rows_that_pile_up_are_merged() -> None:
    table = SessionTable(4, nobody)
    session = submitted(table)
    assert session.take() is None
    table.deliver(StrOut(session.rid, "a", (1,), None, 7))
    table.deliver(StrOut(session.rid, "", (2, 3)))
    table.deliver(StrOut(session.rid, "b", (4,), Finish("stop", 4)))
    merged = session.take()
    assert merged == StrOut(session.rid, "ab", (1, 2, 3, 4), Finish("stop", 4), 7)
    assert session.replied
    assert session.delivered_tokens == 4
    assert session.state is SessionState.DONE
    assert len(table) == 0


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("stop", SessionState.DONE),
        ("length", SessionState.DONE),
        ("abort", SessionState.ABORTED),
        ("error", SessionState.FAILED),
    ],
)
def test_the_finish_decides_the_last_state(reason: str, state: SessionState) -> None:
    table = SessionTable(1, nobody)
    session = submitted(table)
    assert table.deliver(StrOut(session.rid, "", (), Finish(reason))) is Delivery.WAKE
    assert session.state is state


def test_an_illegal_move_tells_the_story() -> None:
    table = SessionTable(1, nobody)
    session = submitted(table)
    with pytest.raises(IllegalMove, match=r"open -> submitted.*; submitted -> submitted"):
        table.submitted(session)


def test_a_row_before_the_request_was_sent_is_a_bug() -> None:
    table = SessionTable(1, nobody)
    session = table.open(1)
    with pytest.raises(IllegalMove, match="before the request was sent"):
        table.deliver(StrOut(session.rid, "a"))


def test_unknown_rows_are_counted_and_dropped() -> None:
    table = SessionTable(1, nobody)
    assert table.deliver(StrOut(99, "a")) is Delivery.LATE
    assert table.late_rows == 1


def test_a_closed_session_counts_until_the_scheduler_let_go_of_it() -> None:
    table = SessionTable(1, nobody)
    session = submitted(table)
    assert table.close(session) is True
    assert table.close(session) is False
    with pytest.raises(Refused):
        table.open(1)
    assert table.deliver(StrOut(session.rid, "x", (1,))) is Delivery.LATE
    assert table.deliver(StrOut(session.rid, "", (), Finish("abort"))) is Delivery.LATE
    assert session.take() is None
    assert table.open(1).rid != session.rid


def test_closing_after_the_terminal_row_needs_no_abort() -> None:
    table = SessionTable(1, nobody)
    session = submitted(table)
    table.deliver(StrOut(session.rid, "x", (1,), Finish("length")))
    assert table.close(session) is False
    assert session.take() is None


def test_full_and_draining_tables_refuse_with_503() -> None:
    table = SessionTable(2, nobody)
    table.open(1)
    table.open(1)
    with pytest.raises(Refused, match="2 requests are in flight") as busy:
        table.open(1)
    assert (busy.value.status, busy.value.retry_after > 0) == (503, True)
    table.draining = True
    with pytest.raises(Refused, match="shutting down"):
        table.open(1)


def test_a_flood_of_one_tenant_leaves_places_to_all_others() -> None:
    table = SessionTable(1024, nobody)
    flood = [table.open(1, tenant="flood") for _ in range(911)]
    with pytest.raises(Refused, match=r"911 requests of this user .*, the 113 places left") as busy:
        table.open(1, tenant="flood")
    assert (busy.value.status, busy.value.retry_after) == (503, 1)
    others = [table.open(1, tenant=f"user {n}") for n in range(113)]
    assert len(table) == 1024
    for session in (*flood, *others):
        table.submitted(session)
        table.deliver(StrOut(session.rid, "", (), Finish("abort")))
    assert len(table) == 0
    assert table._shares.total == 0


def test_requests_without_a_name_are_one_tenant() -> None:
    table = SessionTable(100, nobody)
    for _ in range(89):
        table.open(1)
    with pytest.raises(Refused, match="89 requests of this user"):
        table.open(1)
    table.open(1, tenant="a")


@pytest.mark.parametrize(
    ("at_limit", "one_more"),
    [
        (StrOut(1, "", (5,) * MAX_UNREAD_TOKENS), StrOut(1, "", (5,))),
        (StrOut(1, "x" * MAX_UNREAD_CHARS), StrOut(1, "x")),
    ],
    ids=["tokens", "chars"],
)
def test_unread_output_is_bounded(at_limit: StrOut, one_more: StrOut) -> None:
    """ABT-12."""
    table = SessionTable(1, nobody)
    session = submitted(table)
    assert table.deliver(at_limit) is Delivery.WAKE
    assert table.deliver(one_more) is Delivery.CUT
    last = session.take()
    assert last is not None
    assert last.finish is not None
    assert (last.text, last.finish.reason, last.finish.status) == ("", "error", 408)
    assert "did not read" in last.finish.message
    assert table.close(session) is False
    assert len(table) == 1  # until the scheduler confirms
    assert table.deliver(StrOut(1, "", (), Finish("abort"))) is Delivery.LATE
    assert len(table) == 0


def test_what_was_read_does_not_count_as_unread() -> None:
    table = SessionTable(1, nobody)
    session = submitted(table)
    for _ in range(3):
        assert table.deliver(StrOut(1, "", (5,) * MAX_UNREAD_TOKENS)) is Delivery.WAKE
        assert session.take() is not None


def test_fail_all_ends_live_sessions_only() -> None:
    table = SessionTable(4, nobody)
    live, closed = submitted(table), submitted(table)
    table.close(closed)
    assert table.fail_all(Finish("error", None, "gone", 503)) == [live]
    row = live.take()
    assert row is not None
    assert row.finish == Finish("error", None, "gone", 503)
    assert len(table) == 0


class Sessions(RuleBasedStateMachine):
    """Any order of rows, reads, closes and refusals; the model is a plain dict of texts."""

    LIMIT = 5

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Session] = []
        self.table = SessionTable(self.LIMIT, self.left.append)
        self.sessions: list[Session] = []
        self.in_scheduler: set[int] = set()  # rids without a terminal row
        self.said: dict[int, str] = {}  # what was delivered while somebody wanted it
        self.read: dict[int, str] = {}
        self.terminals: dict[int, int] = {}
        self.closed: set[int] = set()

    @rule()
    def open(self) -> None:
        if len(self.in_scheduler) >= self.LIMIT:
            with pytest.raises(Refused):
                self.table.open(1)
            return
        session = submitted(self.table)
        assert session.rid not in self.said
        self.sessions.append(session)
        self.in_scheduler.add(session.rid)
        self.said[session.rid] = self.read[session.rid] = ""
        self.terminals[session.rid] = 0

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), text=st.text("ab", max_size=3))
    def row(self, data: st.DataObject, text: str) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        before = self.table.late_rows
        delivery = self.table.deliver(StrOut(session.rid, text, (1,)))
        wanted = session.rid in self.in_scheduler and session.rid not in self.closed
        assert delivery is (Delivery.WAKE if wanted else Delivery.LATE)
        assert self.table.late_rows == before + (not wanted)
        if wanted:
            self.said[session.rid] += text

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "error", "abort"]))
    def finish(self, data: st.DataObject, reason: str) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.table.deliver(StrOut(session.rid, "", (), Finish(reason)))
        self.in_scheduler.discard(session.rid)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        row = session.take()
        if row is None:
            return
        assert session.rid not in self.closed
        assert not self.terminals[session.rid]
        self.read[session.rid] += row.text
        self.terminals[session.rid] += row.finish is not None

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        must_abort = self.table.close(session)
        assert must_abort == (session.rid in self.in_scheduler and session.rid not in self.closed)
        self.closed.add(session.rid)

    @invariant()
    def nothing_is_lost_or_said_twice(self) -> None:
        assert len(self.table) == len(self.in_scheduler)
        left = [session.rid for session in self.left]
        assert sorted(left) == sorted(set(self.said) - self.in_scheduler)
        for session in self.sessions:
            rid = session.rid
            assert self.terminals[rid] <= 1
            assert self.said[rid].startswith(self.read[rid])
            if self.terminals[rid]:
                assert self.read[rid] == self.said[rid]


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
