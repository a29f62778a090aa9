"""The full set of laws, too dear for each step: ownership, locks, and what every slot holds."""

import zlib
from array import array
from collections.abc import Iterator

from tokenloom.bench.simulation.driver import Driver
from tokenloom.scheduler_proc.core.radix_cache import TreeNode


def check_all(driver: Driver) -> None:
    """I1 to I4 by the core's own audit, then all slots against I7 and I12."""
    driver.scheduler.check()
    _check_requests(driver)
    _check_tree(driver)


def _states(ids: "array[int]", state: int, lora_id: int) -> Iterator[int]:
    for token_id in ids:
        state = zlib.crc32(token_id.to_bytes(4, "little"), state ^ lora_id * 0x9E37) or 1
        yield state


def _slots(driver: Driver, pages: list[int]) -> list[int]:
    size, slots = driver.runner.page_size, driver.runner.slots
    return [state for page in pages for state in slots[page * size : (page + 1) * size]]


def _check_requests(driver: Driver) -> None:
    """What a request has computed stands in its pages, in order, under its own salt and adapter."""
    for req in driver.scheduler._running.values():
        kv = req.kv
        assert kv is not None
        known = (
            min(kv.landed, len(req.ids)) if kv.sound else kv.tree_pages * driver.runner.page_size
        )
        script = driver.runner.scripts[req.rid]
        wanted = list(_states(req.ids[:known], script.salt, script.lora_id))
        held = _slots(driver, kv.pages)[:known]
        assert held == wanted, f"I7, I12: the pages of {req.rid} do not hold its tokens"


def _check_tree(driver: Driver) -> None:
    """Each node's pages hold the KV of the ids on its path, of one salt and one adapter."""
    starts = {(0, 0)} | {(one.salt, one.lora_id) for one in driver.runner.scripts.values()}
    todo: list[tuple[TreeNode, set[tuple[int, int]]]] = [
        (child, starts) for child in driver.scheduler._kv.tree.root.children.values()
    ]
    while todo:
        node, befores = todo.pop()
        ids = array("i")
        ids.frombytes(node.key)
        held = _slots(driver, node.pages)
        ends = {before for before in befores if held[0] == next(_states(ids[:1], *before))}
        assert ends, f"I7, I12: node {node.uid} does not follow its parent"
        for before in ends:
            assert held == list(_states(ids, *before)), f"I7: node {node.uid} holds other tokens"
        after = {(held[-1], lora_id) for _, lora_id in ends}
        todo += [(child, after) for child in node.children.values()]
