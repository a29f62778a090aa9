"""WebGuard: refuse requests that web pages send, told by Host, Origin and content type.

A browser lets any page send requests to any address that it can reach, this server's included. It
names the page in Origin or Sec-Fetch-Site, and sends JSON only after a preflight. A page can also
point its own host name at this server (DNS rebinding); only Host reveals that.
"""

import re
from collections.abc import Collection

from starlette.types import Scope

from ...wire.door_config import is_loopback
from ..errors import quoted
from .errors import ApiError
from .request_head import values

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
_BODY_METHODS = ("POST", "PUT", "PATCH")
_JSON = re.compile(rb"application/(json|[a-z0-9.!#$&^_-]+\+json)")


class WebGuard:
    def __init__(self, allowed_hosts: Collection[str] = (), own_host: str = "localhost") -> None:
        """Take `allowed_hosts`, valid in Host beside loopback names; `*` is any.

        `own_host`, the address that the server listens on, is always allowed.
        """
        self._allowed = {name.lower().removesuffix(".") for name in (*allowed_hosts, own_host)}
        self._restricted = bool(allowed_hosts)

    def check(self, scope: Scope) -> None:
        """Raise ApiError 400, 403 or 415 for a request that must not be served."""
        headers = scope["headers"]
        host = next(iter(values(headers, b"host")), b"").decode("latin-1").lower()
        if host:
            self._check_host(host, scope.get("server"))
        _check_origin(headers, host)
        if scope["method"] in _BODY_METHODS:
            _check_content_type(headers)

    def _check_host(self, host: str, server: tuple[str, int] | None) -> None:
        found = _HOST.fullmatch(host)
        if found is None:
            raise ApiError(400, f"the Host header is not a host and a port: {quoted(host)}")
        name = found[1].removeprefix("[").removesuffix("]").removesuffix(".")
        if name in self._allowed or "*" in self._allowed or is_loopback(name):
            return
        if server is None or is_loopback(server[0]):
            pass
        elif not self._restricted or name == server[0]:
            return  # a server opened to a network may be called by any name
        raise ApiError(
            403,
            f"the Host header names {quoted(name)}; start the server with --allowed-hosts "
            "to serve requests for that name",
        )


def _check_origin(headers: list[tuple[bytes, bytes]], host: str) -> None:
    own = (f"http://{host}", f"https://{host}")  # https: a proxy may stand before us
    for origin in values(headers, b"origin"):
        if not host or origin.decode("latin-1").lower() not in own:
            raise ApiError(403, f"web pages of {quoted(origin.decode('latin-1'))} are not served")
    for site in values(headers, b"sec-fetch-site"):
        if site.lower() == b"cross-site":
            raise ApiError(403, "web pages of other sites are not served")


def _check_content_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Accept JSON or no type: without a type a browser names its page, which was checked."""
    for value in values(headers, b"content-type"):
        kind = value.partition(b";")[0].strip().lower()
        if _JSON.fullmatch(kind) is None:
            raise ApiError(
                415,
                "the body must be JSON, with the header Content-Type: application/json instead of "
                f"{quoted(kind.decode('latin-1'))}; "
                "with curl: -H 'Content-Type: application/json'",
            )
