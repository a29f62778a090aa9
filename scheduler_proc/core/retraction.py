"""The order in which running requests are retracted or preempted. PURE.

Called by core/scheduler.py, core/prefill_adder.py and core/preemption.py.
"""

from collections.abc import Iterable

from .req import Req

MAX_RETRACTIONS = 2  # after this many, all that a request may need is reserved at admission


def is_protected(req: Req) -> bool:
    """Whether it was retracted so often that its full need is reserved, to spare it another."""
    return req.retractions >= MAX_RETRACTIONS


def _first_to_go(req: Req) -> tuple[bool, int, int, int]:
    """Sort key: protected ones last, lower priority first, then shorter answer, then newest."""
    return is_protected(req), req.priority, req.output_len, -req.arrival


def all_but_the_last(running: Iterable[Req]) -> list[Req]:
    """Requests to retract for the others' next tokens, in order; the last of all always stays.

    A retraction does not change the order of the others, so one sort serves a whole step.
    """
    return sorted(running, key=_first_to_go)[:-1]


def in_giving_order(running: Iterable[Req]) -> list[Req]:
    """All but the protected requests, in the order in which to retract them."""
    return sorted((req for req in running if not is_protected(req)), key=_first_to_go)


def preemptable_by(req: Req, running: Iterable[Req], threshold: int) -> list[Req]:
    """Requests that `req` outranks by the threshold, in the order in which to preempt them.

    A preempted request does not outrank its preemptor, so no two preempt each other in turns.
    """
    return in_giving_order(one for one in running if req.priority - one.priority >= threshold)
