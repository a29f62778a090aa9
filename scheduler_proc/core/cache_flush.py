"""CacheFlushes: who asked for an empty prefix cache, and until when they will wait for it.

Owned by core/scheduler.py. A flush happens at the first moment at which nothing runs or waits; up
to then requests are accepted as ever, so its time may run out and it is refused. PURE.
"""

from ...wire.messages import FlushOut, FlushReq
from .kv_cache import KVCache


class CacheFlushes:
    def __init__(self) -> None:
        self._asked: list[tuple[float, FlushReq]] = []  # with the time at which it is too late

    def ask(self, request: FlushReq, now: float) -> None:
        self._asked.append((now + request.timeout_s, request))

    def answer(self, kv: KVCache, running: int, waiting: int, now: float) -> list[FlushOut]:
        """Flush if nobody is there; else refuse those whose time is up."""
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
