"""TenantShares: how much of a bounded capacity one tenant may hold beside others. PURE.

Used by the front's session table and the scheduler's queue limits. A tenant may add while it holds
less than eight times what is free (dynamic thresholds, Choudhury and Hahne, 1998): alone it reaches
8/9 of the capacity, and a tenant that holds nothing may add while anything is free.
"""

TIMES = 8


class TenantShares:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self._held: dict[str, int] = {}

    def held_by(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def may_add(self, tenant: str) -> bool:
        return self.held_by(tenant) < TIMES * (self.capacity - self.total)

    def add(self, tenant: str, amount: int = 1) -> None:
        """Add `amount` to the tenant's share; a negative amount gives it back."""
        self.total += amount
        held = self.held_by(tenant) + amount
        if held:
            self._held[tenant] = held
        else:
            self._held.pop(tenant, None)
