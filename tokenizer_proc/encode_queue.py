"""EncodeQueue: short texts are tokenised at once, long ones in turn in a thread of their own.

Owned by the front. The loop that serves everybody's streams does not wait for one client's long
text: the tokenizer computes without the interpreter's lock. A caller has at most one piece of work
in the thread's queue, so callers are served in turns, however many texts each of them has.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .errors import Refused
from .limits import MAX_INLINE_CHARS

S = TypeVar("S")
T = TypeVar("T")


class EncodeQueue:
    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting = 0
        # One: the short texts of others need the rest of the cores less than the model does.
        self._thread = ThreadPoolExecutor(1, "encode")

    async def run(
        self, encode: Callable[[S], T], texts: Sequence[S], chars: Callable[[S], int]
    ) -> list[T]:
        """`encode` of each of `texts`, in order; `chars` says how long one is.

        Stops at the first text for which `encode` raises, and when the caller is cancelled: what
        follows is never looked at. Raises Refused when too many callers wait.
        """
        if sum(map(chars, texts)) <= MAX_INLINE_CHARS:
            return list(map(encode, texts))
        if self._waiting >= self._max_waiting:
            raise Refused(503, f"the server is busy: {self._waiting} long prompts wait for tokens")
        self._waiting += 1
        loop = asyncio.get_running_loop()
        results: list[T] = []
        try:
            for piece in _pieces(texts, chars):
                results += await loop.run_in_executor(
                    self._thread, lambda texts: list(map(encode, texts)), piece
                )
            return results
        finally:
            self._waiting -= 1


def _pieces(texts: Sequence[S], chars: Callable[[S], int]) -> Iterator[list[S]]:
    """Neighbouring texts of at most MAX_INLINE_CHARS together, and longer ones alone."""
    piece: list[S] = []
    size = 0
    for text in texts:
        length = chars(text)
        if piece and size + length > MAX_INLINE_CHARS:
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += length
    if piece:
        yield piece
