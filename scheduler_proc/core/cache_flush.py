"""CacheFlushes: pending requests to flush the prefix cache, each with a deadline.

Owned by core/scheduler.py. A flush happens as soon as no request runs or waits. Until then requests
are still accepted, so the deadline may pass and the flush is refused. PURE.
"""

from ...wire.messages import FlushOut, FlushReq
from .kv_cache import KVCache


class CacheFlushes:
    def __init__(self) -> None:
        self._asked: list[tuple[float, FlushReq]] = []  # deadline, request

    def ask(self, request: FlushReq, now: float) -> None:
        self._asked.append((now + request.timeout_s, request))

    def answer(self, kv: KVCache, running: int, waiting: int, now: float) -> list[FlushOut]:
        """Flush if no request runs or waits; else refuse the flushes whose deadline has passed."""
        if not self._asked:
            return []
        if not running and not waiting:
            answers = [FlushOut(one.seq, True, pages=kv.flush()) for _, one in self._asked]
            self._asked = []
            return answers
        late = [one for deadline, one in self._asked if deadline <= now]
        self._asked = [entry for entry in self._asked if entry[0] > now]
        why = f"the server is not idle: {running} requests run and {waiting} wait"
        return [FlushOut(one.seq, False, why) for one in late]
