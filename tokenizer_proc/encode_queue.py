"""EncodeQueue: encode short texts in the event loop, long ones in turn in a worker thread.

Owned by the front. Long texts do not stall the loop, since the tokenizer computes without the
interpreter's lock. Each caller has at most one piece in the thread's queue, so callers take turns,
however many texts each has.
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
        # One worker: the model needs the other cores more.
        self._thread = ThreadPoolExecutor(1, "encode")

    async def run(
        self, encode: Callable[[S], T], texts: Sequence[S], chars: Callable[[S], int]
    ) -> list[T]:
        """Return `encode(text)` for each of `texts`, in order; `chars` returns a text's length.

        Stops at the first text for which `encode` raises, and on cancellation; later texts are not
        touched. Raises Refused when too many callers wait.
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
    """Group neighbouring texts of at most MAX_INLINE_CHARS together; yield longer ones alone."""
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
