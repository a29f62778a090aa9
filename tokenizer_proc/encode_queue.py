"""EncodeQueue: short texts are tokenised at once, long ones in turn in a thread of their own.

Owned by the front. The loop that serves everybody's streams does not wait for one client's long
text: the tokenizer computes without the interpreter's lock.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .errors import Refused
from .limits import MAX_INLINE_CHARS

T = TypeVar("T")


class EncodeQueue:
    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting = 0
        # One: the short texts of others need the rest of the cores less than the model does.
        self._thread = ThreadPoolExecutor(1, "encode")

    async def run(self, encode: Callable[[], T], chars: int) -> T:
        """The result of `encode`, whose texts have `chars` characters. Raises Refused when full."""
        if chars <= MAX_INLINE_CHARS:
            return encode()
        if self._waiting >= self._max_waiting:
            raise Refused(503, f"the server is busy: {self._waiting} long prompts wait for tokens")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, encode)
        finally:
            self._waiting -= 1
