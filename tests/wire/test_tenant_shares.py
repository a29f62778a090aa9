"""Shares of a bounded whole: what a flood leaves to others, and that nobody else is refused."""

from random import Random

import pytest

from tokenloom.wire.tenant_shares import TenantShares


def flood(shares: TenantShares, tenant: str) -> int:
    """It takes all it can get; how much that was."""
    taken = 0
    while shares.may_add(tenant):
        shares.add(tenant)
        taken += 1
    return taken


@pytest.mark.parametrize("capacity", [1, 2, 8, 9, 10, 100, 1024])
def test_a_lone_tenant_gets_eight_ninths(capacity: int) -> None:
    assert 8 * capacity / 9 <= flood(TenantShares(capacity), "a") <= 8 * capacity / 9 + 1


def test_each_flood_leaves_a_ninth_of_what_it_found() -> None:
    shares = TenantShares(1024)
    left = [1024]
    for tenant in "abc":
        flood(shares, tenant)
        left.append(1024 - shares.total)
    assert left == [1024, 113, 12, 1]
    assert shares.may_add("d"), "who holds nothing may have the last place"
    shares.add("d")
    assert not shares.may_add("e")


def test_a_flood_that_gives_back_comes_down_to_the_share_of_the_others() -> None:
    shares = TenantShares(1024)
    flood(shares, "a")
    for _ in range(1000):
        shares.add("a", -1)
        for tenant in ("b", "a"):
            if shares.may_add(tenant):
                shares.add(tenant)
    assert abs(shares.held_by("a") - shares.held_by("b")) <= 8
    assert 1024 - shares.total >= 1024 // 17 - 1


@pytest.mark.parametrize("floods", [1, 3, 10])
def test_hundreds_of_small_tenants_are_never_refused_beside_floods(floods: int) -> None:
    """Whatever ends when: floods ask at each turn, of 1,000 others at most 40 are there at once."""
    random, shares = Random(floods), TenantShares(1024)
    held: list[str] = []
    for _ in range(200):  # floods grow together
        for n in range(floods):
            if shares.may_add(f"flood {n}"):
                shares.add(f"flood {n}")
                held.append(f"flood {n}")
    small: list[str] = []
    room = 1024 // (8 * floods + 1) - 1
    for turn in range(5000):
        for n in range(floods):
            while shares.may_add(f"flood {n}"):
                shares.add(f"flood {n}")
                held.append(f"flood {n}")
        shares.add(held.pop(random.randrange(len(held))), -1)
        if len(small) >= min(room, 40):
            shares.add(small.pop(0), -1)
        tenant = f"small {turn % 1000}"
        assert shares.may_add(tenant)
        shares.add(tenant)
        small.append(tenant)


def test_all_that_is_given_back_is_forgotten() -> None:
    shares = TenantShares(100)
    for n in range(50):
        shares.add(str(n), 2)
    for n in range(50):
        shares.add(str(n), -2)
    assert (shares.total, shares._held) == (0, {})
