"""DoorConfig: flags of the HTTP and socket doors, a group of ServerConfig (config.py).

PURE: msgspec only. The front gets the whole group.
"""

import ipaddress
from typing import Annotated

import msgspec
from msgspec import Meta


class DoorConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address that HTTP listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of HTTP; 0 takes a free one")] = (
        30000
    )
    socket: Annotated[
        str | None,
        Meta(
            description="address of the socket door, e.g. tcp://127.0.0.1:31000; "
            "default: an ipc path that clients find from the port"
        ),
    ] = None
    max_queued_requests: Annotated[
        int, Meta(ge=1, description="requests in flight at the front before it answers 503")
    ] = 1024
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="open HTTP connections; of more, those that wait for their client longest "
            "are closed, and when none does a new one is answered with 503",
        ),
    ] = 2048
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="larger HTTP bodies get 413; a short context lowers this")
    ] = 4 << 20
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(\*|[A-Za-z0-9._:-]+)$")], ...],
        Meta(
            description="name without port that requests may have in their Host header, beside "
            "those of loopback; * is any; may be repeated",
            extra={"form": "NAME"},
        ),
    ] = ()
    allow_unauthenticated_network: Annotated[
        bool,
        Meta(
            description="let --host and --socket be reached from other machines, though anybody "
            "who reaches them may use them"
        ),
    ] = False
    access_log: Annotated[
        bool, Meta(description="log a line for each HTTP request: method, path, status, size, time")
    ] = False


def network_exposure(doors: DoorConfig) -> str | None:
    """Return why the doors may not open: other machines could reach them, which no flag allows."""
    if doors.allow_unauthenticated_network:
        return None
    socket_host = _tcp_host(doors.socket or "")
    for flag, value, host in (
        ("--host", doors.host, doors.host),
        ("--socket", doors.socket, socket_host),
    ):
        if host is not None and not is_loopback(host):
            return (
                f"{flag} {value} can be reached from other machines, and there is no "
                "authentication: add --allow-unauthenticated-network if anybody there may use "
                "this server"
            )
    return None


def _tcp_host(address: str) -> str | None:
    """Return the host of a tcp:// address; None for other transports and for no host (loopback)."""
    if not address.startswith("tcp://"):
        return None
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]") or None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
