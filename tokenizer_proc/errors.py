"""Errors of the front for all doors, and helpers that quote client values in messages. PURE.

The front and the doors raise them; each door renders them (`doors/errors.py` for HTTP). Input that
breaks a bound is `wire.sampling.InvalidRequest`.
"""

from collections.abc import Sequence

from ..wire.messages import Finish
from .limits import MAX_LISTED_NAMES, MAX_QUOTED_CHARS, RETRY_AFTER_BUSY


class IllegalMove(RuntimeError):
    """A state machine was asked for a transition that its table does not have: a bug."""


class Refused(Exception):
    """The server cannot serve a valid request now."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        """Take `retry_after` in seconds; a 503 always has one."""
        super().__init__(message)
        self.status = status
        self.message = message
        unsaid = RETRY_AFTER_BUSY if status == 503 else None
        self.retry_after = unsaid if retry_after is None else retry_after

    @classmethod
    def of(cls, finish: Finish) -> "Refused":
        """Convert a `finish` with reason "error" to the error for the client."""
        status = finish.status if 400 <= finish.status <= 599 else 500
        return cls(status, finish.message or "the request failed", finish.retry_after)


class NoSuchAdapter(Refused):
    """The request names an adapter that was never loaded, or that was unloaded."""

    def __init__(self, name: str, there: Sequence[str]) -> None:
        super().__init__(404, f"there is no adapter {quoted(name)} here; loaded: {listed(there)}")
        self.name = name
        self.there = there


def quoted(value: str) -> str:
    """Quote a client's text for an error message: escaped, and cut when it is long."""
    if len(value) <= MAX_QUOTED_CHARS:
        return repr(value)
    return f"{value[:MAX_QUOTED_CHARS]!r}... ({len(value)} characters)"


def shortened(text: str) -> str:
    """Cut a long text that is not ours, such as a library's message about a client's value."""
    if len(text) <= MAX_QUOTED_CHARS:
        return text
    return f"{text[:MAX_QUOTED_CHARS]}... ({len(text)} characters)"


def listed(names: Sequence[str]) -> str:
    """Join names for an error message, at most MAX_LISTED_NAMES."""
    left = len(names) - MAX_LISTED_NAMES
    some = ", ".join(names[:MAX_LISTED_NAMES]) or "none"
    return some + (f" and {left} more" if left > 0 else "")
