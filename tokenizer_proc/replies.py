"""Replies: who waits for which answer of the scheduler to a control message, by its seq.

Owned by the front, one for each kind of question; the doors never see a seq of the scheduler's.
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
        """The answer to what `send` sends; for how long to wait is the caller's to say."""
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
        """False for an answer to what was never asked; that nobody waits any more is no fault."""
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
