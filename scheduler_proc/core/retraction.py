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


def choose_victim(running: Iterable[Req]) -> Req | None:
    """The one to retract for the others' next tokens; never the only one."""
    reqs = list(running)
    return min(reqs, key=_first_to_go) if len(reqs) > 1 else None


def preemptable_by(req: Req, running: Iterable[Req], threshold: int) -> list[Req]:
    """Those whom `req` outranks by the threshold, the first to go first; never a protected one.

    A preempted request outranks none that preempted it, so no two can take turns.
    """
    lesser = [
        other
        for other in running
        if req.priority - other.priority >= threshold and not is_protected(other)
    ]
    return sorted(lesser, key=_first_to_go)
