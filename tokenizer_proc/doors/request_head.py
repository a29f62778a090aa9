"""Checks on the head of an HTTP request before it is served. PURE.

Called by `connection`, `request_reader` and `web_guard`. The parser has checked syntax;
these checks refuse framing that two servers could read differently, as request smuggling does.
"""

from collections.abc import Sequence
from urllib.parse import unquote

RawHeaders = Sequence[tuple[bytes, bytes]]

VERSIONS = ("1.0", "1.1")


def fault(version: str, headers: RawHeaders) -> str | None:
    """Describe what is wrong with a head, for the client; None for a good one."""
    if version not in VERSIONS:
        return f"HTTP/{version} is not served here; send HTTP/1.1"
    hosts = values(headers, b"host")
    if len(hosts) > 1:
        return f"a request must have one Host header, this one has {len(hosts)}"
    if version == "1.1" and not hosts:
        return "a request of HTTP/1.1 must have a Host header"
    codings = values(headers, b"transfer-encoding")
    if codings and version == "1.0":
        return "HTTP/1.0 has no Transfer-Encoding; send a Content-Length"
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        return "the only Transfer-Encoding that is accepted is: chunked"
    lengths = values(headers, b"content-length")
    if lengths and codings:
        return "a request must not have both Content-Length and Transfer-Encoding"
    if len(lengths) > 1 or any(not length.isdigit() for length in lengths):
        return "Content-Length must be one whole number"
    return None


def values(headers: RawHeaders, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def body_length(headers: RawHeaders) -> int | None:
    """Return the body's length in bytes from a valid head; None: chunked."""
    if values(headers, b"transfer-encoding"):
        return None
    lengths = values(headers, b"content-length")
    return int(lengths[0]) if lengths else 0


def expects_continue(version: str, headers: RawHeaders) -> bool:
    """Return whether the client waits for `100 Continue` before it sends the body."""
    wishes = values(headers, b"expect")
    return version == "1.1" and any(wish.lower() == b"100-continue" for wish in wishes)


def with_host(headers: RawHeaders, host: bytes, port: int | None) -> list[tuple[bytes, bytes]]:
    """Replace the Host header by the host of an absolute target, which takes precedence."""
    name = b"[%s]" % host if b":" in host else host
    value = name if port is None else b"%s:%d" % (name, port)
    return [(b"host", value), *(header for header in headers if header[0] != b"host")]


def without_upgrade(method: bytes, target: bytes, version: str, headers: RawHeaders) -> bytes:
    """Rebuild the head without its Upgrade header, which a server may ignore."""
    lines = [b"%s %s HTTP/%s\r\n" % (method, target, version.encode())]
    lines += [b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join(lines) + b"\r\n"


def path_of(raw_path: bytes) -> str:
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path
