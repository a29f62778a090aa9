"""How many may wait, how long, and how long a request may take in all. PURE.

Owned by core/scheduler.py, which tells what enters, starts and ends. A retracted request has
started: it neither counts as waiting nor is refused. Time is whatever the caller says.
"""

from ...wire.messages import Finish
from ...wire.scheduling_config import SchedulingConfig
from .failures import failure
from .req import Req
from .time_limit import TimeLimit

RETRY_AFTER = 1  # seconds: the queue moves with every answer


class QueueLimits:
    def __init__(self, settings: SchedulingConfig) -> None:
        self._max_requests = settings.max_waiting_requests
        self._max_tokens = settings.max_waiting_tokens
        self._requests = 0
        self._tokens = 0
        self._until_start = TimeLimit(settings.queue_timeout)
        self._until_end = TimeLimit(settings.request_timeout)

    def refusal(self, req: Req) -> Finish | None:
        """Why the request may not wait beside those that do. An empty queue takes any."""
        if self._max_requests is not None and self._requests >= self._max_requests:
            return _busy(
                f"{self._requests} requests are waiting (--max-waiting-requests "
                f"{self._max_requests})"
            )
        tokens = self._tokens + req.prompt_len
        if self._max_tokens is not None and self._requests and tokens > self._max_tokens:
            return _busy(
                f"{self._tokens} prompt tokens are waiting, {req.prompt_len} more are too many "
                f"(--max-waiting-tokens {self._max_tokens})"
            )
        return None

    def enter(self, req: Req, now: float) -> None:
        self._requests += 1
        self._tokens += req.prompt_len
        self._until_start.begin(req.rid, now)
        self._until_end.begin(req.rid, now)

    def start(self, req: Req) -> None:
        """Its first start only."""
        self._requests -= 1
        self._tokens -= req.prompt_len
        self._until_start.clear(req.rid)

    def end(self, req: Req) -> None:
        if not req.admitted:
            self.start(req)
        self._until_end.clear(req.rid)

    def expired(self, now: float) -> list[tuple[int, Finish]]:
        """The rids whose time is over, with what they are told; each limit speaks once."""
        why = f"not started within {self._until_start.seconds} s (--queue-timeout)"
        late = [(rid, _busy(why)) for rid in self._until_start.take_expired(now)]
        why = f"not finished within {self._until_end.seconds} s (--request-timeout)"
        timeout = failure(408, why)
        return late + [(rid, timeout) for rid in self._until_end.take_expired(now)]


def _busy(why: str) -> Finish:
    return failure(503, why, retry_after=RETRY_AFTER)
