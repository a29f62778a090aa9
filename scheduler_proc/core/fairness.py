"""VirtualTokenCounters: the service that each tenant has got (Sheng et al., OSDI 2024). PURE.

Owned by core/waiting_queue.py: the tenant with the smallest counter goes next. A tenant that comes
back is lifted to the least counter of the waiting ones, so that absence saves up no service.
"""

import heapq
from collections import Counter

MAX_IDLE = 4096  # counters kept for tenants without requests; beyond, the smallest are forgotten
_SLACK = 64


class VirtualTokenCounters:
    def __init__(self, output_weight: float) -> None:
        self._output_weight = output_weight
        self._counters: dict[str, float] = {}
        self._requests: Counter[str] = Counter()  # unfinished requests by tenant
        self._waiting: set[str] = set()
        self._heap: list[tuple[float, str]] = []  # waiting tenants; entries may be stale
        self._idle: list[tuple[float, str]] = []
        self._last = ""  # the last tenant to leave the queue
        self._level = 0.0

    def __getitem__(self, tenant: str) -> float:
        return self._counters[tenant]

    def __len__(self) -> int:
        return len(self._counters)

    def enter(self, tenant: str) -> None:
        """Count a new request of the tenant."""
        self._requests[tenant] += 1

    def end(self, tenant: str) -> None:
        """Count an ended request of the tenant; call after `leave`."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            heapq.heappush(self._idle, (self._counters[tenant], tenant))
            self._forget_idle()

    def join(self, tenant: str) -> None:
        """Add a tenant that has begun to wait, with its counter lifted to the least."""
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._least())
        self._waiting.add(tenant)
        heapq.heappush(self._heap, (self._counters[tenant], tenant))

    def leave(self, tenant: str) -> None:
        """Remove a tenant that has no waiting request any more."""
        self._waiting.remove(tenant)
        self._last = tenant
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._heap = [(self._counters[one], one) for one in self._waiting]
            heapq.heapify(self._heap)

    def charge_prompt(self, tenant: str, tokens: int) -> None:
        self._counters[tenant] += tokens

    def charge_answer(self, tenant: str) -> None:
        """Charge one generated token."""
        self._counters[tenant] += self._output_weight

    def _least(self) -> float:
        """The least counter of the waiting tenants, else that of the last one; never falls."""
        while self._heap:
            counter, tenant = self._heap[0]
            if tenant not in self._waiting:
                heapq.heappop(self._heap)
            elif counter != self._counters[tenant]:
                heapq.heapreplace(self._heap, (self._counters[tenant], tenant))
            else:
                self._level = max(self._level, counter)
                return self._level
        self._level = max(self._level, self._counters.get(self._last, 0.0))
        return self._level

    def _forget_idle(self) -> None:
        """Drop idle counters that `join` would lift anyway, and the smallest beyond MAX_IDLE."""
        least = self._least()
        while self._idle and (self._idle[0][0] <= least or len(self._idle) > MAX_IDLE):
            counter, tenant = heapq.heappop(self._idle)
            if tenant not in self._requests and self._counters.get(tenant) == counter:
                del self._counters[tenant]
