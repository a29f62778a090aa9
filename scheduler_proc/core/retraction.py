"""Who gives way when the pool is too small for all that run, or to a request of higher rank. PURE.

Called by core/scheduler.py and core/prefill_adder.py.
"""

from collections.abc import Iterable

from .req import Req

MAX_RETRACTIONS = 2  # after so many, a request is admitted only with all it may need in reserve


def is_protected(req: Req) -> bool:
    """Retracted often enough: the pool keeps its full need, so nobody has to retract it again."""
    return req.retractions >= MAX_RETRACTIONS


def _first_to_go(req: Req) -> tuple[bool, int, int, int]:
    """Protected ones last, lower priority first, then the least generated work, newest first."""
    return is_protected(req), req.priority, req.output_len, -req.arrival


def all_but_the_last(running: Iterable[Req]) -> list[Req]:
    """Whom to retract for the others' next tokens, the first to go first; one always stays.

    A retraction changes nobody else's place, so one sort serves a whole step.
    """
    return sorted(running, key=_first_to_go)[:-1]


def in_giving_order(running: Iterable[Req]) -> list[Req]:
    """All but the protected, the first to go first."""
    return sorted((req for req in running if not is_protected(req)), key=_first_to_go)


def preemptable_by(req: Req, running: Iterable[Req], threshold: int) -> list[Req]:
    """Those whom `req` outranks by the threshold, in giving order.

    A preempted request outranks none that preempted it, so no two can take turns.
    """
    return in_giving_order(one for one in running if req.priority - one.priority >= threshold)
