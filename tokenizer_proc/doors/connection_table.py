"""Which HTTP connections are open, and which one gives way when there is no room. PURE.

A full table makes room for a new connection by dropping one that waits for its client, so silent or
slow clients cannot keep others out. It takes the one that has waited longest of the address that
holds most of the waiting ones: a crowd from one address hurts nobody else. A connection whose
request is being computed is never dropped.
"""

import ipaddress
from typing import Generic, TypeVar

C = TypeVar("C")

_IPV6_NETWORK_BITS = 64  # what one client usually has to choose addresses from


class TableFull(Exception):
    """All open connections have requests that are being computed."""


class ConnectionTable(Generic[C]):
    def __init__(self, most: int) -> None:
        self.most = most
        self._addresses: dict[C, str] = {}
        self._waiting: dict[str, dict[C, None]] = {}  # by address, the longest wait first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: C, peer: str) -> C | None:
        """Enter a connection, which waits; the one that must be closed for it, already removed."""
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
        """The connection waits for its client; it keeps its place if it did so before."""
        address = self._addresses.get(connection)
        if address is not None:
            self._waiting.setdefault(address, {}).setdefault(connection)

    def works(self, connection: C) -> None:
        """A request of the connection is being computed."""
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
    """What counts as one address: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))
