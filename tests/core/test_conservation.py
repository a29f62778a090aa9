"""The audit of page ownership notices every way in which the books can be wrong."""

import re
from array import array
from collections.abc import Callable

import pytest
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.conservation import (
    SLICE,
    ConservationError,
    audit,
    check_conservation,
)
from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.messages import TokenizedGenerateReq
from tokenloom.wire.sampling import SamplingParams

PROMPT = list(range(1, 23))  # five pages and a half


def cook(books: Callable[[KVCache, Req], object], says: str) -> None:
    """Books of one running request with five pages in the tree and one of its own are cooked."""
    bench = Bench(pool_tokens=64)
    bench.submit(PROMPT, 30, ignore_eos=True)
    bench.step()
    (req,) = bench.scheduler._running.values()
    assert req.kv is not None
    assert req.kv.tree_pages == 5
    assert len(req.kv.pages) == 6
    bench.scheduler.check()
    books(bench.scheduler._kv, req)
    with pytest.raises(ConservationError, match=re.escape(says)):
        bench.scheduler.check()


def test_sound_books_of_namespaces_and_forks_are_found_sound() -> None:
    bench = Bench()
    for namespace in ("", "a"):
        for length in (8, 16, 22):
            bench.submit([*PROMPT[:length], *[length] * 8], namespace=namespace)
        bench.run()
    bench.submit([*PROMPT, 1], namespace="a")
    bench.step()
    bench.scheduler.check()
    starts = [node.start for node in bench.scheduler._kv.tree.nodes()]
    assert len(set(starts)) >= 3, "levels"


def test_a_lost_page() -> None:
    cook(lambda kv, req: kv.pages.alloc(1), "lost pages: [")


def test_a_page_that_is_free_and_owned() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        kv.pages.free(req.kv.pages[-1:])

    cook(books, "has more than one owner")


def test_a_page_that_is_free_and_in_the_tree() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        kv.pages.free(req.kv.pages[:1])

    cook(books, "has more than one owner")


def test_a_foreign_page() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.pages.append(0)

    cook(books, "page 0 is outside the pool")


def test_a_node_with_more_key_than_pages() -> None:
    def books(kv: KVCache, req: Req) -> None:
        kv.tree.nodes()[0].key += b"1234"

    cook(books, "key and pages")


def test_an_empty_node() -> None:
    def books(kv: KVCache, req: Req) -> None:
        node = kv.tree.nodes()[0]
        kv.pages.free(node.pages)
        node.key, node.pages = b"", []

    cook(books, "is empty")


def test_a_node_that_its_parent_does_not_know_by_its_key() -> None:
    def books(kv: KVCache, req: Req) -> None:
        children = kv.tree.root.children
        children[b"another"] = children.pop(next(iter(children)))

    cook(books, "is not its parent's child")


def test_a_node_whose_key_is_another_than_its_parent_s() -> None:
    def books(kv: KVCache, req: Req) -> None:
        node = kv.tree.nodes()[0]
        node.key = node.key[4:] + node.key[:4]

    cook(books, "edge and key")


def test_a_node_with_another_number_of_pages_above() -> None:
    def books(kv: KVCache, req: Req) -> None:
        kv.tree.nodes()[0].start += 1

    cook(books, "pages above are miscounted")


def test_miscounted_nodes() -> None:
    def books(kv: KVCache, req: Req) -> None:
        kv.tree.num_nodes += 1

    cook(books, "nodes are miscounted")


def test_a_leaf_that_would_never_be_evicted() -> None:
    bench = Bench()
    bench.submit(PROMPT)
    bench.run()
    bench.scheduler._kv.tree._order.clear()
    with pytest.raises(ConservationError, match="an unlocked leaf is not up for eviction"):
        bench.scheduler.check()


def test_a_request_of_other_ids_than_its_path() -> None:
    def books(kv: KVCache, req: Req) -> None:
        req.ids[0] += 1

    cook(books, "request 1 and its tree path disagree on ids")


def test_a_request_in_another_namespace_than_its_path() -> None:
    def books(kv: KVCache, req: Req) -> None:
        req.namespace = "another"

    cook(books, "request 1 reads another namespace")


def test_miscounted_locks() -> None:
    def books(kv: KVCache, req: Req) -> None:
        kv.tree.nodes()[0].lock_count += 1

    cook(books, "locks are miscounted")


def test_miscounted_pages_of_the_tree() -> None:
    def more_evictable(kv: KVCache, req: Req) -> None:
        kv.tree.evictable_pages += 1

    def more_locked(kv: KVCache, req: Req) -> None:
        kv.tree.locked_pages += 1

    cook(more_evictable, "evictable pages are miscounted")
    cook(more_locked, "locked pages are miscounted")


def test_a_request_with_other_pages_than_its_path() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.pages[0], req.kv.pages[1] = req.kv.pages[1], req.kv.pages[0]

    cook(books, "request 1 and its tree path disagree on pages")


def test_a_request_that_computed_more_than_its_pages_hold() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.computed = 25

    cook(books, "request 1 has more computed tokens than pages")


def test_a_request_that_landed_before_it_was_launched_or_knows_too_little() -> None:
    def early(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.landed = req.kv.computed + 1

    def unknown(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        assert kv.grow(req.kv, 4)
        req.kv.computed = len(req.ids) + 1
        check_conservation(kv, [req])  # one token may be on its way
        req.kv.computed += 1

    cook(early, "landed, computed and known tokens disagree")
    cook(unknown, "landed, computed and known tokens disagree")


def test_lost_and_doubled_rows() -> None:
    def lose(kv: KVCache, req: Req) -> None:
        kv.rows.alloc(1)

    def double(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.row = kv.rows.free_numbers()[0]

    cook(lose, "rows are lost or held twice")
    cook(double, "rows are lost or held twice")


def filled_by(bench: Bench, requests: int, length: int) -> None:
    for n in range(requests):
        ids = array("i", [n % 90 + 1, n // 90 + 1, *[7] * length]).tobytes()
        params = SamplingParams(max_new_tokens=1, seed=0)
        bench.scheduler.handle(TokenizedGenerateReq(n + 1, ids, params))
    while batch := bench.scheduler.get_next_batch_to_run():
        bench.scheduler.process_batch_result(bench.runner.run(batch))


def test_an_audit_is_made_of_slices_however_large_the_pool() -> None:
    """Of many nodes, and of one with more pages than a slice has."""
    bench = Bench(pool_tokens=60_000, page_size=1, max_running=64, chunk=0)
    filled_by(bench, 400, 40)
    kv = bench.scheduler._kv
    pages = kv.pages.alloc(3 * SLICE)
    key = b"".join(n.to_bytes(4, "little") for n in range(1000, 1000 + len(pages)))
    kv.tree.unlock(kv.tree.insert(kv.tree.root, key, pages).node)
    looked = list(audit(kv, ()))
    assert kv.tree.num_nodes > 400
    assert len(looked) > 60_000 // SLICE
    assert max(looked) <= 2 * SLICE
    assert sum(looked) >= 60_000 + kv.tree.num_nodes


def test_an_idle_audit_goes_on_where_it_stopped_and_starts_again_after_a_request() -> None:
    bench = Bench(pool_tokens=64, page_size=1)
    bench.scheduler.audit.size = 8
    slices = sum(1 for _ in audit(bench.scheduler._kv, (), 8))
    problems: list[str] = []
    for _ in range(slices - 1):
        assert bench.scheduler.on_idle(problems.append)
    bench.scheduler.stats()
    assert bench.scheduler.on_idle(problems.append)
    assert not bench.scheduler.on_idle(problems.append)
    assert not bench.scheduler.on_idle(problems.append), "and is not made twice for nothing"
    bench.submit(PROMPT, 3)
    bench.run()
    assert bench.scheduler.on_idle(problems.append)
    bench.submit(PROMPT, 3)
    bench.run()
    bench.scheduler._kv.pages.alloc(1)
    while bench.scheduler.on_idle(problems.append):
        pass
    (problem,) = problems
    assert problem.startswith("lost pages")
    assert bench.scheduler.totals.violations == 1
