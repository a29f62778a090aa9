"""Every phase of an HTTP connection on a fake clock: when it ends, and what does not delay that."""

import pytest

from tokenloom.tokenizer_proc.doors.phases import RULES, Phase, Progress, Verdict
from tokenloom.tokenizer_proc.limits import (
    BODY_GRACE_SECONDS,
    BODY_SECONDS,
    FIRST_BYTE_SECONDS,
    HEAD_SECONDS,
    IDLE_SECONDS,
    LINGER_SECONDS,
    MIN_BODY_RATE,
    MIN_SEND_RATE,
    SEND_STALL_SECONDS,
)


def serving(now: float = 0.0) -> Progress:
    """A connection whose request is complete and whose answer is not."""
    progress = Progress(0.0)
    progress.head_began(0.0)
    progress.head_ended(0.0)
    progress.body_ended(now)
    return progress


def test_every_phase_but_the_answer_has_a_deadline() -> None:
    assert set(RULES) == set(Phase) - {Phase.ANSWER}


def test_a_fresh_connection() -> None:
    progress = Progress(5.0)
    assert (progress.phase, progress.verdict) == (Phase.FRESH, Verdict.CLOSE)
    assert progress.deadline == 5.0 + FIRST_BYTE_SECONDS
    progress.body_came(1000)  # not of a body: it counts for nothing
    assert progress.deadline == 5.0 + FIRST_BYTE_SECONDS


def test_a_head() -> None:
    progress = Progress(0.0)
    progress.head_began(7.0)
    assert (progress.phase, progress.verdict) == (Phase.HEAD, Verdict.REFUSE)
    assert progress.deadline == 7.0 + HEAD_SECONDS
    progress.head_began(9.0)  # told again: the time does not begin anew
    assert progress.deadline == 7.0 + HEAD_SECONDS


def test_a_body_must_come_at_a_rate_and_within_a_time() -> None:
    progress = Progress(0.0)
    progress.head_began(1.0)
    progress.head_ended(2.0)
    assert (progress.phase, progress.verdict) == (Phase.BODY, Verdict.REFUSE)
    assert progress.deadline == 2.0 + BODY_GRACE_SECONDS
    for _ in range(MIN_BODY_RATE):
        progress.body_came(1)
    assert progress.deadline == 2.0 + BODY_GRACE_SECONDS + 1
    progress.body_came(1 << 40)
    assert progress.deadline == 2.0 + BODY_SECONDS


def test_one_byte_each_five_seconds_ends_in_time() -> None:
    progress = Progress(0.0)
    progress.head_began(0.0)
    progress.head_ended(0.0)
    now = 0.0
    while progress.deadline is not None and now < progress.deadline:
        now += 5.0
        progress.body_came(1)
    assert now <= BODY_GRACE_SECONDS + 5.0


def test_an_answer_takes_the_time_that_it_takes() -> None:
    progress = serving()
    assert (progress.phase, progress.deadline) == (Phase.ANSWER, None)
    assert not progress.waits_for_client
    assert not progress.wants_bytes


def test_a_client_that_does_not_read() -> None:
    progress = serving()
    progress.blocked(10.0, unsent=3 * MIN_SEND_RATE)
    assert (progress.phase, progress.verdict) == (Phase.BLOCKED, Verdict.ABORT)
    assert progress.deadline == 10.0 + SEND_STALL_SECONDS + 3
    progress.blocked(20.0, unsent=9 * MIN_SEND_RATE)
    assert progress.deadline == 10.0 + SEND_STALL_SECONDS + 3
    progress.unblocked(30.0)
    assert (progress.phase, progress.deadline) == (Phase.ANSWER, None)


def test_a_client_that_does_not_read_the_end_of_an_answer() -> None:
    progress = serving()
    progress.blocked(10.0, unsent=0)
    progress.answered(11.0)
    assert progress.phase is Phase.BLOCKED
    assert progress.deadline == 10.0 + SEND_STALL_SECONDS
    progress.unblocked(12.0)
    assert (progress.phase, progress.deadline) == (Phase.IDLE, 12.0 + IDLE_SECONDS)


def test_between_two_requests() -> None:
    progress = serving()
    progress.answered(50.0)
    assert (progress.phase, progress.verdict) == (Phase.IDLE, Verdict.CLOSE)
    assert progress.deadline == 50.0 + IDLE_SECONDS
    progress.body_came(1)
    assert progress.deadline == 50.0 + IDLE_SECONDS
    progress.head_began(60.0)
    assert (progress.phase, progress.deadline) == (Phase.HEAD, 60.0 + HEAD_SECONDS)


@pytest.mark.parametrize("phase", [Phase.LINGER, Phase.CLOSING])
def test_the_end_is_final(phase: Phase) -> None:
    progress = serving()
    if phase is Phase.LINGER:
        progress.lingers(3.0)
        deadline = 3.0 + LINGER_SECONDS
    else:
        progress.closes(3.0, unsent=2 * MIN_SEND_RATE)
        deadline = 3.0 + SEND_STALL_SECONDS + 2
    progress.blocked(4.0, 1 << 30)
    progress.unblocked(5.0)
    progress.answered(5.0)
    progress.head_began(6.0)
    progress.head_ended(7.0)
    progress.body_came(1 << 30)
    assert progress.phase is phase
    assert progress.ending
    assert (progress.deadline, progress.verdict) == (deadline, Verdict.ABORT)


def test_an_answer_that_is_complete_before_the_body() -> None:
    """The connection reads on as a body until it is told to linger."""
    progress = Progress(0.0)
    progress.head_began(0.0)
    progress.head_ended(0.0)
    progress.answered(1.0)
    assert progress.deadline is not None
    progress.lingers(1.0)
    assert progress.deadline == 1.0 + LINGER_SECONDS


def test_requests_that_are_sent_ahead() -> None:
    progress = serving()
    progress.head_began(1.0)  # half a head behind a running answer has no deadline yet
    assert (progress.phase, progress.deadline) == (Phase.ANSWER, None)
    progress.head_ended(2.0)
    assert progress.phase is Phase.ANSWER
    progress.answered(30.0)  # now the second one is served, and its body is due
    assert (progress.phase, progress.deadline) == (Phase.BODY, 30.0 + BODY_GRACE_SECONDS)
    progress.body_ended(31.0)
    progress.head_began(32.0)
    progress.answered(33.0)
    assert (progress.phase, progress.deadline) == (Phase.HEAD, 33.0 + HEAD_SECONDS)
