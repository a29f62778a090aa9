"""Format of the access log: one line per request. PURE.

A line has no secrets: no query, no header, no body. Client text is escaped.
"""

from ..limits import MAX_QUOTED_CHARS


def line(method: str, raw_path: bytes, status: int, sent_bytes: int, seconds: float) -> str:
    """Format a line; `status` is 0 if the client left before the status line."""
    shown = raw_path.decode("ascii", "backslashreplace")
    shown = "".join(c if c.isprintable() and c not in '"\\' else f"\\x{ord(c):02x}" for c in shown)
    if len(shown) > MAX_QUOTED_CHARS:
        shown = shown[:MAX_QUOTED_CHARS] + "..."
    return f'"{method} {shown}" {status or "-"} {sent_bytes} bytes {seconds:.3f} s'
