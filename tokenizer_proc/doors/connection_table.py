"""ConnectionTable: the open HTTP connections, and which one is closed when it is full. PURE.

Used by `connection`. To admit a new connection a full table drops one that waits for its client, so
silent or slow clients cannot keep others out: the one waiting longest at the address with most
waiting connections, so a crowd from one address hurts only itself. A connection whose request is
being computed is never dropped.
"""

import ipaddress
from typing import Generic, TypeVar

C = TypeVar("C")

_IPV6_NETWORK_BITS = 64  # the usual size of one client's network


class TableFull(Exception):
    """Every open connection has a request that is being computed."""


class ConnectionTable(Generic[C]):
    def __init__(self, most: int) -> None:
        self.most = most
        self._addresses: dict[C, str] = {}
        self._waiting: dict[str, dict[C, None]] = {}  # by address, longest wait first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: C, peer: str) -> C | None:
        """Add a waiting connection; return the one to close for it, already removed, or None."""
        victim = None
        if len(self._addresses) >= self.most:
            victim = self._longest_waiting()
            if victim is None:
                raise TableFull
            self.remove(victim)
        self._addresses[connection] = network(peer)
        self.waits(connection)
        return victim

    def waits(self, connection: C) -> None:
        """Mark the connection as waiting for its client; a waiting one keeps its place."""
        address = self._addresses.get(connection)
        if address is not None:
            self._waiting.setdefault(address, {}).setdefault(connection)

    def works(self, connection: C) -> None:
        """Mark the connection as having a request that is being computed."""
        address = self._addresses.get(connection)
        crowd = self._waiting.get(address, {}) if address is not None else {}
        crowd.pop(connection, None)
        if not crowd and address is not None:
            self._waiting.pop(address, None)

    def remove(self, connection: C) -> None:
        self.works(connection)
        self._addresses.pop(connection, None)

    def _longest_waiting(self) -> C | None:
        crowd = max(self._waiting.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd))


def network(peer: str) -> str:
    """Return the address that counts: an IPv4 address, or the /64 network of an IPv6 one."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))
