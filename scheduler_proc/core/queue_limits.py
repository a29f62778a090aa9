"""QueueLimits: bounds the waiting requests and tokens, the wait, and a request's total time. PURE.

Owned by core/scheduler.py, which reports what enters, starts and ends. A retracted request has
started: it neither counts as waiting nor is refused. Times are the caller's `now`, in seconds.
"""

import heapq

from ...wire.messages import Finish
from ...wire.scheduling_config import SchedulingConfig
from ...wire.tenant_shares import TenantShares
from .failures import failure
from .req import Req
from .time_limit import TimeLimit

_SLACK = 64  # stale heap entries allowed before it is rebuilt
RETRY_AFTER = 1  # seconds; short, because the queue moves with every answer


class QueueLimits:
    def __init__(self, settings: SchedulingConfig) -> None:
        self._max_requests = settings.max_waiting_requests
        self._max_tokens = settings.max_waiting_tokens
        self._requests = 0
        self._tokens = 0
        self._request_shares = TenantShares(self._max_requests or 0)
        self._token_shares = TenantShares(self._max_tokens or 0)
        self._waiting: set[int] = set()  # rids; kept only if a cap is set
        self._lowest: list[tuple[int, int, Req]] = []  # a heap of them; some entries are stale
        self._until_start = TimeLimit(settings.queue_timeout)
        self._until_end = TimeLimit(settings.request_timeout)

    def admit(self, req: Req) -> tuple[list[tuple[Req, Finish]], Finish | None]:
        """The requests to displace for `req`, each with its Finish, or the reason to refuse `req`.

        Requests of lower priority are displaced, the lowest and latest first, if that is enough.
        """
        refusal = self._refusal(req)
        if refusal is None:
            return [], self._over_its_share(req)
        if not self._fits_alone(req):
            return [], refusal
        requests, tokens = self._requests, self._tokens
        displaced: list[tuple[Req, Finish]] = []
        entries: list[tuple[int, int, Req]] = []
        while refusal is not None and (lesser := self._worst()) and lesser.priority < req.priority:
            entries.append(heapq.heappop(self._lowest))
            self._requests -= 1
            self._tokens -= lesser.prompt_len
            displaced.append((lesser, _busy("a request of higher priority took its place")))
            refusal = self._refusal(req)
        self._requests, self._tokens = requests, tokens  # the caller ends them one by one
        for entry in entries:
            heapq.heappush(self._lowest, entry)
        return ([], refusal) if refusal is not None else (displaced, None)

    def _over_its_share(self, req: Req) -> Finish | None:
        """The reason to refuse a tenant above its share although there is room for the request.

        Shares hold among equals: a request that outranks a waiting one is exempt.
        """
        worst = self._worst()
        if worst is None or worst.priority < req.priority:
            return None
        for most, shares, what in (
            (self._max_requests, self._request_shares, "requests of this user are waiting"),
            (self._max_tokens, self._token_shares, "prompt tokens of this user are waiting"),
        ):
            if most is not None and not shares.may_add(req.tenant):
                return _busy(f"{shares.held_by(req.tenant)} {what}, the rest is kept for others")
        return None

    def _fits_alone(self, req: Req) -> bool:
        return self._max_tokens is None or req.prompt_len <= self._max_tokens

    def _worst(self) -> Req | None:
        """The waiting request of lowest priority that never started; of equals the latest."""
        while self._lowest and self._lowest[0][2].rid not in self._waiting:
            heapq.heappop(self._lowest)
        return self._lowest[0][2] if self._lowest else None

    def _refusal(self, req: Req) -> Finish | None:
        """The reason to refuse a request that exceeds a cap. An empty queue takes any length."""
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
        if self._max_requests is not None or self._max_tokens is not None:
            self._waiting.add(req.rid)
            heapq.heappush(self._lowest, (req.priority, -req.arrival, req))
            if len(self._lowest) > 2 * len(self._waiting) + _SLACK:
                self._lowest = [one for one in self._lowest if one[2].rid in self._waiting]
                heapq.heapify(self._lowest)
        self._count(req, 1)
        self._until_start.begin(req.rid, now)
        self._until_end.begin(req.rid, now)

    def start(self, req: Req) -> None:
        """Stop counting a request as waiting, at its first start only."""
        self._waiting.discard(req.rid)
        self._count(req, -1)
        self._until_start.clear(req.rid)

    def _count(self, req: Req, sign: int) -> None:
        self._requests += sign
        self._tokens += sign * req.prompt_len
        self._request_shares.add(req.tenant, sign)
        self._token_shares.add(req.tenant, sign * req.prompt_len)

    def end(self, req: Req) -> None:
        if not req.admitted:
            self.start(req)
        self._until_end.clear(req.rid)

    def expired(self, now: float) -> list[tuple[int, Finish]]:
        """The rids whose deadline has passed, each with its Finish; a deadline expires once."""
        why = f"not started within {self._until_start.seconds} s (--queue-timeout)"
        late = [(rid, _busy(why)) for rid in self._until_start.take_expired(now)]
        why = f"not finished within {self._until_end.seconds} s (--request-timeout)"
        timeout = failure(408, why)
        return late + [(rid, timeout) for rid in self._until_end.take_expired(now)]


def _busy(why: str) -> Finish:
    return failure(503, why, retry_after=RETRY_AFTER)
