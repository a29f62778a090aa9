"""The eviction order by itself: it stays small and in order, however often its leaves are used."""

import random

from tokenloom.scheduler_proc.core.eviction import EvictionOrder
from tokenloom.scheduler_proc.core.radix_cache import TreeNode

ROOT = TreeNode(0, b"", b"", [], None, start=0, created=0, priority=0)


def leaves(count: int) -> list[TreeNode]:
    return [TreeNode(n, b"", b"", [n], ROOT, start=0, created=n, priority=0) for n in range(count)]


def test_many_uses_leave_few_entries_and_the_order_right() -> None:
    """Each use leaves an entry that counts no more; and is dropped some time later."""
    order: EvictionOrder[TreeNode] = EvictionOrder("priority", 1)
    nodes, draw, longest = leaves(300), random.Random(1), 0
    for node in nodes:
        order.push(node)
    for tick in range(1, 5000):
        node = draw.choice(nodes)
        node.priority, node.last_use = draw.randrange(9), tick
        order.push(node)
        longest = max(longest, len(order._heap))
    assert order.live(0, len(order)) == 300
    assert 2 * 300 < longest <= 2 * 300 + 64, "dropped rarely, and before they are the most"
    expected = sorted(nodes, key=lambda node: (node.priority, node.last_use))
    assert [order.pop() for _ in expected] == expected
    assert order.pop() is None


def test_the_order_of_a_cleared_tree_starts_small_again() -> None:
    order: EvictionOrder[TreeNode] = EvictionOrder("lru", 1)
    for node in leaves(1000):
        order.push(node)
    order.clear()
    (one,) = leaves(1)
    for _ in range(500):
        order.push(one)
        assert len(order._heap) <= 2 * 1 + 64
    assert order.pop() is one
    assert order.pop() is None
