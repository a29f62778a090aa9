"""Health: whether the server makes progress, and a probe that generates one token.

Owned by the front; `server` ticks it, the routes of doors/service.py query it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from ..wire.messages import StrOut
from .errors import Refused
from .limits import HEALTH_GENERATE_SECONDS
from .progress import Progress

log = logging.getLogger(__name__)


class Answer(Protocol):
    def __aiter__(self) -> AsyncIterator[StrOut]: ...

    def close(self) -> None: ...


class Health:
    def __init__(self, ask: Callable[[], Answer]) -> None:
        """`ask` submits a request for one token."""
        self.progress = Progress()
        self.probe = HealthProbe(ask)
        self.problem: str | None = None  # why the server is not ready; None if it is

    def tick(self, now: float) -> None:
        """Judge the progress of scheduler and detokenizer; call it about twice a second."""
        self.progress.tick(now)
        before, self.problem = self.problem, self.progress.problem
        if self.problem is None and before is not None:
            log.warning("the server makes progress again")
        elif self.problem is not None and before is None:
            log.warning("not ready: %s", self.problem)
        if self.problem is not None:
            self.probe.fail(self.problem)


class HealthProbe:
    """One-token generation shared by all waiting callers; aborted when the last one leaves."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        """`ask` submits a request for one token."""
        self._ask = ask
        self._running: asyncio.Task[None] | None = None
        self._askers = 0
        self._limit: asyncio.Timeout | None = None
        self._why = ""

    @property
    def running(self) -> bool:
        return self._running is not None

    async def one_token(self) -> None:
        """Wait for the token of the current or a new probe; raises Refused if none comes."""
        if self._running is None:
            self._running = asyncio.create_task(self._generate(self._ask()))
        probe = self._running
        self._askers += 1
        try:
            await asyncio.shield(probe)
        finally:
            self._askers -= 1
            if not self._askers:
                probe.cancel()

    def fail(self, why: str) -> None:
        """End a running probe with the cause `why`; idempotent."""
        limit, self._limit = self._limit, None
        if limit is not None and not limit.expired():
            self._why = why
            limit.reschedule(asyncio.get_running_loop().time())

    async def _generate(self, answer: Answer) -> None:
        self._why = f"no token was generated within {HEALTH_GENERATE_SECONDS:g} s"
        try:
            async with asyncio.timeout(HEALTH_GENERATE_SECONDS) as self._limit:
                async for row in answer:
                    if row.finish is not None and row.finish.reason == "error":
                        raise Refused.of(row.finish)
        except TimeoutError:
            raise Refused(503, self._why) from None
        finally:
            self._running = self._limit = None
            answer.close()
