"""Phases of an HTTP connection and their deadlines. PURE.

`connection` reports events with their times and asks for the deadline. A deadline follows from the
start of the phase and the bytes of progress (body bytes, or bytes sent of those unsent at its
start): bytes alone never restart it.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from ..limits import (
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


class Phase(Enum):
    FRESH = "fresh"  # accepted; no byte of a request has come, line breaks do not count
    HEAD = "head"  # within the request line or the headers
    BODY = "body"  # within the body of the request being served
    ANSWER = "answer"  # the request is complete, its answer is computed or sent
    BLOCKED = "blocked"  # the client does not take the bytes of an answer
    IDLE = "idle"  # an answer is complete; no byte of the next request has come
    LINGER = "linger"  # the last answer is sent, further input is discarded
    CLOSING = "closing"  # closed on our side, with bytes still to send


class Verdict(Enum):
    """What to do with a connection whose deadline has passed."""

    CLOSE = "close"
    REFUSE = "refuse"  # 408, then close
    ABORT = "abort"  # drop it with its unsent bytes


class Rule(msgspec.Struct, frozen=True):
    seconds: float
    verdict: Verdict
    bytes_per_second: float | None = None  # so many bytes of progress buy another second
    at_most: float | None = None  # seconds, however many bytes come


Rules = Mapping[Phase, Rule]

RULES: Rules = {  # a missing phase has no deadline of its own
    Phase.FRESH: Rule(FIRST_BYTE_SECONDS, Verdict.CLOSE),
    Phase.HEAD: Rule(HEAD_SECONDS, Verdict.REFUSE),
    Phase.BODY: Rule(BODY_GRACE_SECONDS, Verdict.REFUSE, MIN_BODY_RATE, BODY_SECONDS),
    Phase.BLOCKED: Rule(SEND_STALL_SECONDS, Verdict.ABORT, MIN_SEND_RATE),
    Phase.IDLE: Rule(IDLE_SECONDS, Verdict.CLOSE),
    Phase.LINGER: Rule(LINGER_SECONDS, Verdict.ABORT),
    Phase.CLOSING: Rule(SEND_STALL_SECONDS, Verdict.ABORT, MIN_SEND_RATE),
}


class Progress:
    """Phase of one connection, updated by events.

    Requests may be pipelined, so reading and answering are tracked apart; the phase follows from
    both.
    """

    def __init__(self, now: float, rules: Rules = RULES) -> None:
        self.phase = Phase.FRESH
        self._rules = rules
        self._since = now
        self._bytes = 0  # of progress in this phase
        self._reading = Phase.FRESH  # or HEAD or BODY, of the request that is being read
        self._unanswered = 0  # requests whose head is complete and whose answer is not
        self._blocked = False

    @property
    def deadline(self) -> float | None:
        rule = self._rules.get(self.phase)
        if rule is None:
            return None
        seconds = rule.seconds
        if rule.bytes_per_second is not None:
            seconds += self._bytes / rule.bytes_per_second
        return self._since + (seconds if rule.at_most is None else min(seconds, rule.at_most))

    @property
    def verdict(self) -> Verdict:
        return self._rules[self.phase].verdict

    @property
    def ending(self) -> bool:
        """Whether further input is ignored."""
        return self.phase in (Phase.LINGER, Phase.CLOSING)

    @property
    def waits_for_client(self) -> bool:
        """Whether no request is being computed, so that closing loses no work."""
        return self.phase is not Phase.ANSWER

    @property
    def wants_bytes(self) -> bool:
        """Whether input is parsed at once, rather than kept until after the answer."""
        return self.phase in (Phase.FRESH, Phase.IDLE, Phase.HEAD, Phase.BODY)

    def head_began(self, now: float) -> None:
        self._reading = Phase.HEAD
        self._settle(now)

    def head_ended(self, now: float) -> None:
        self._reading = Phase.BODY
        self._unanswered += 1
        self._settle(now)

    def body_came(self, count: int) -> None:
        if self.phase is Phase.BODY:
            self._bytes += count

    def body_ended(self, now: float) -> None:
        self._reading = Phase.IDLE
        self._settle(now)

    def answered(self, now: float) -> None:
        self._unanswered -= 1
        self._settle(now)

    def blocked(self, now: float, unsent: int) -> None:
        self._blocked = True
        self._settle(now, unsent)

    def unblocked(self, now: float) -> None:
        self._blocked = False
        self._settle(now)

    def lingers(self, now: float) -> None:
        self._enter(Phase.LINGER, now)

    def closes(self, now: float, unsent: int) -> None:
        self._enter(Phase.CLOSING, now, unsent)

    def _settle(self, now: float, unsent: int = 0) -> None:
        if not self.ending:
            self._enter(self._current(), now, unsent)

    def _current(self) -> Phase:
        if self._blocked:
            return Phase.BLOCKED
        if self._unanswered == 0:
            return self._reading
        if self._unanswered == 1 and self._reading is Phase.BODY:
            return Phase.BODY
        return Phase.ANSWER

    def _enter(self, phase: Phase, now: float, progress: int = 0) -> None:
        if phase is not self.phase:
            self.phase, self._since, self._bytes = phase, now, progress
