"""BodyBudget: bound on the bytes of all request bodies that are being received. PURE.

Owned by the HTTP door; each Exchange takes bytes as they arrive and releases them when its body is
complete or refused.
"""

from ..errors import Refused
from ..limits import MAX_BODIES_BYTES


class BodyBudget:
    def __init__(self, most: int = MAX_BODIES_BYTES) -> None:
        self._most = most
        self._used = 0

    def take(self, num_bytes: int) -> None:
        """Reserve bytes; raises Refused with 503 when all bodies together are too large."""
        if self._used + num_bytes > self._most:
            raise Refused(503, "the server is busy: too many large bodies are being sent to it")
        self._used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._used -= num_bytes
