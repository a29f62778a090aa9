"""Pages and rows of requests by themselves: growth, imagined releases, what a match remembers."""

from array import array

from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req, ReqKV
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

PAGE = 4


def cache(num_pages: int = 16) -> KVCache:
    return KVCache(SchedulingConfig(page_size=PAGE, max_running_requests=8), num_pages + 1)


def admit(kv: KVCache, rid: int, ids: list[int], tokens: int) -> Req:
    """It runs, and so many of its tokens have been computed."""
    req = Req(rid, rid, SamplingParams(), array("i", ids), len(ids), 99, frozenset())
    kv.admit(req, kv.match(req))
    compute(kv, req, tokens)
    return req


def compute(kv: KVCache, req: Req, tokens: int) -> None:
    assert req.kv is not None
    missing = tokens - req.kv.computed
    assert kv.grow(req.kv, missing)
    req.kv.computed += missing
    req.kv.landed += missing
    kv.commit(req)


def held(req: Req) -> ReqKV:
    assert req.kv is not None
    return req.kv


def test_one_grows_by_what_it_lacks_and_no_page_more() -> None:
    kv = cache()
    req = admit(kv, 1, [1] * 20, 5)
    kv.take_new_pages()
    for tokens, pages in ((0, 2), (3, 2), (4, 3), (5, 3), (11, 4), (1, 4)):
        assert kv.grow(held(req), tokens)
        assert len(held(req).pages) == pages
    assert [index for _, index, _ in kv.take_new_pages()] == [2, 3]


def test_one_that_cannot_grow_stays_as_it_was() -> None:
    kv = cache(num_pages=3)
    req = admit(kv, 1, [1] * 20, 5)
    assert not kv.grow(held(req), 12)
    assert len(held(req).pages) == 2
    assert kv.pages.available == 1


def test_an_imagined_release_frees_as_much_as_a_real_one() -> None:
    """Whether others read the same prefix, a part of it, or nothing of it."""
    for victims in ([0], [1], [0, 1], [2], [0, 1, 2], [1, 2]):
        kv = cache()
        reqs = [
            admit(kv, 1, [1] * 8 + [2] * 6, 14),
            admit(kv, 2, [1] * 8 + [3] * 9, 17),
            admit(kv, 3, [4] * 6, 6),
        ]
        before = kv.reachable_pages
        leaving = [reqs[victim] for victim in victims]
        with kv.as_if_released(leaving):
            imagined = kv.reachable_pages
        assert kv.reachable_pages == before
        for req in leaving:
            kv.release(req)
        assert kv.reachable_pages == imagined


def test_one_that_starts_again_finds_what_it_has_computed_since_the_last_time() -> None:
    """Its prompt was cached as a whole, so that its first match could not have become longer."""
    kv = cache()
    kv.release(admit(kv, 1, [1] * 9, 9))
    req = admit(kv, 2, [1] * 9, 9)
    req.ids.extend([2] * 8)
    compute(kv, req, 17)
    kv.release(req)
    assert kv.match(req).num_pages == 4
