"""Strays: counter of malformed or unexpected mailbox messages, which are logged and dropped.

A frame that does not decode is malformed. A message about an unknown request or child is
unexpected; each receiver decides which those are.
"""

import logging

import msgspec

from .log_limit import LogLimit

SHOWN_CHARS = 200  # of a dropped message, in its log line

log = logging.getLogger(__name__)


class Strays:
    def __init__(self) -> None:
        self.malformed = 0
        self.unexpected = 0
        self._log = LogLimit(log)

    @property
    def total(self) -> int:
        return self.malformed + self.unexpected

    def drop_frame(self, frame: bytes, error: Exception) -> None:
        self.malformed += 1
        self._log.warning("dropped a malformed frame of %d bytes: %s", len(frame), error)

    def drop_message(self, message: msgspec.Struct) -> None:
        self.unexpected += 1
        self._log.warning("dropped an unexpected message: %s", repr(message)[:SHOWN_CHARS])
