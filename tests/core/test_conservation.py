"""The audit of page ownership notices every way in which the books can be wrong."""

import re
from collections.abc import Callable

import pytest
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.conservation import ConservationError, check_conservation
from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req

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

    cook(books, "pages with more than one owner: [")


def test_a_page_that_is_free_and_in_the_tree() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        kv.pages.free(req.kv.pages[:1])

    cook(books, "pages with more than one owner: [")


def test_a_foreign_page() -> None:
    def books(kv: KVCache, req: Req) -> None:
        assert req.kv is not None
        req.kv.pages.append(0)

    cook(books, "lost pages")


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
