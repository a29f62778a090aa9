"""The line of the access log for one request. PURE.

It holds nothing secret: no query, no header, no body. What the client chose is escaped.
"""

from ..limits import MAX_QUOTED_CHARS


def line(method: str, raw_path: bytes, status: int, sent_bytes: int, seconds: float) -> str:
    """`status` is 0 when the client left before there was one."""
    shown = raw_path.decode("ascii", "backslashreplace")
    shown = "".join(c if c.isprintable() and c not in '"\\' else f"\\x{ord(c):02x}" for c in shown)
    if len(shown) > MAX_QUOTED_CHARS:
        shown = shown[:MAX_QUOTED_CHARS] + "..."
    return f'"{method} {shown}" {status or "-"} {sent_bytes} bytes {seconds:.3f} s'
