"""Replies: pending control messages to the scheduler, matched to their answers by seq.

Owned by the front, one per kind of message; the doors never see these seqs.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Replies(Generic[T]):
    def __init__(self) -> None:
        self._last_seq = 0
        self._waiting: dict[int, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, send: Callable[[int], None]) -> T:
        """Send a message through `send` and wait for its answer; the caller sets the timeout."""
        self._last_seq += 1
        seq = self._last_seq
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = waiter
        try:
            send(seq)
            return await waiter
        finally:
            del self._waiting[seq]

    def take(self, seq: int, answer: T) -> bool:
        """Deliver an answer, even if its caller has left; return False for a seq never sent."""
        if not 0 < seq <= self._last_seq:
            return False
        waiter = self._waiting.get(seq)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)
        return True

    def fail_all(self, error: Exception) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
