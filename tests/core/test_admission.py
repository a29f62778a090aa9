"""What is kept free for answers to come."""

from array import array

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.admission import Admission
from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

PAGE = 16


def waiting(number: int, length: int, max_new: int) -> Req:
    ids = array("i", [number * 1000 + i for i in range(length)])
    return Req(number, number, SamplingParams(), ids, length, max_new, frozenset())


def cache(num_pages: int) -> KVCache:
    settings = SchedulingConfig(page_size=PAGE, max_running_requests=1000)
    return KVCache(settings, num_pages + 1)


def test_a_retraction_teaches_the_ratio() -> None:
    admission = Admission(SchedulingConfig(schedule_conservativeness=0.1))
    survivor = waiting(1, 4, 99)
    survivor.ids.extend([0] * 30)
    admission.after_decodes([survivor], retracted=True)
    assert admission.ratio.value == (30 + 20) / 100


def test_shared_pages_count_once() -> None:
    """Running requests that share most of their prompts leave room accordingly."""
    admission = Admission(SchedulingConfig())
    kv = cache(100)
    running = [waiting(1, 640, 16)]
    kv.admit(running[0], kv.match(running[0]))
    assert running[0].kv is not None
    assert kv.grow(running[0].kv, 640)
    running[0].kv.computed = running[0].kv.landed = 640
    kv.commit(running[0])
    for number in range(2, 6):
        req = waiting(number, 656, 16)
        req.ids[:640] = running[0].ids[:640]
        kv.admit(req, kv.match(req))
        assert req.kv is not None
        assert kv.grow(req.kv, 16)
        running.append(req)
    other = waiting(9, 640, 16)
    assert admission.reserve(kv, running).take(other, kv.match(other))


def test_a_candidate_is_tested_with_its_prefix_locked() -> None:
    """SCH-09: what it finds in the tree cannot be evicted for it."""
    admission = Admission(SchedulingConfig())
    kv = cache(20)
    first = waiting(1, 160, 1)
    kv.admit(first, kv.match(first))
    assert first.kv is not None
    assert kv.grow(first.kv, 160)
    first.kv.computed = first.kv.landed = 160
    kv.release(first)
    again = waiting(1, 161, 160)
    assert len(kv.match(again).pages) == 10
    assert not admission.reserve(kv, []).take(again, kv.match(again)), "needs 21 of 20 pages"
    again.max_new_tokens = 159
    assert admission.reserve(kv, []).take(again, kv.match(again)), "needs all 20"


def start(kv: KVCache, req: Req, tokens: int) -> None:
    """It runs, and so many tokens of its prompt have pages."""
    kv.admit(req, kv.match(req))
    assert req.kv is not None
    assert kv.grow(req.kv, tokens)


def test_several_candidates_share_what_room_there_is() -> None:
    """A cached prefix that somebody holds anyway leaves more room for the next one."""
    admission = Admission(SchedulingConfig())
    kv = cache(30)
    first = waiting(1, 160, 16)
    start(kv, first, 160)
    assert first.kv is not None
    first.kv.computed = first.kv.landed = 160
    kv.commit(first)
    reserve = admission.reserve(kv, [first])
    for number in range(2, 9):
        twin = waiting(number, 176, 16)
        twin.ids[:160] = first.ids[:160]
        assert len(kv.match(twin).pages) == 10
        assert reserve.take(twin, kv.match(twin))
    other = waiting(9, 80, 16)
    assert not reserve.take(other, kv.match(other)), "11 + 7 * 2 of 30 are taken"


def test_the_rest_of_a_prompt_that_is_cut_counts_in_full() -> None:
    admission = Admission(SchedulingConfig())
    kv = cache(30)
    long = waiting(1, 320, 16)
    start(kv, long, 32)
    reserve = admission.reserve(kv, [long])
    other = waiting(2, 144, 16)
    assert not reserve.take(other, kv.match(other)), "10 pages beside 21"
    other = waiting(3, 128, 16)
    assert reserve.take(other, kv.match(other)), "9 pages beside 21"


def test_one_that_has_all_its_pages_needs_no_more() -> None:
    kv = cache(20)
    first = waiting(1, 60, 4)
    start(kv, first, 60)
    rest = waiting(2, 16 * 15, 16)
    assert Admission(SchedulingConfig()).reserve(kv, [first]).take(rest, kv.match(rest))


def test_a_protected_request_is_sure_of_its_whole_limit() -> None:
    chosen = Admission(SchedulingConfig())
    chosen.ratio.value = 0.01
    kv = cache(20)
    first = waiting(1, 16, 16 * 15)
    kv.admit(first, kv.match(first))
    assert first.kv is not None
    assert kv.grow(first.kv, 16)
    long, short = waiting(2, 80, 16), waiting(3, 48, 16)
    assert chosen.reserve(kv, [first]).take(long, kv.match(long))
    first.retractions = 2
    assert not chosen.reserve(kv, [first]).take(long, kv.match(long)), "6 pages beside 16 of 20"
    assert chosen.reserve(kv, [first]).take(short, kv.match(short))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_more_work_than_pool(page_size: int) -> None:
    """SCH-01, SCH-08: as if each were alone, few retractions, at most three times the steps."""
    steps = []
    for pool in (512, 2048):
        bench = Bench(pool_tokens=pool, page_size=page_size, chunk=64, ratio=0.01)
        rids = [bench.submit(prompt(20, seed), 100, ignore_eos=True) for seed in range(8)]
        steps.append(bench.run())
        assert bench.scheduler.totals.retractions <= 2 * len(rids)
        assert (bench.scheduler.totals.retractions > 0) == (pool == 512)
        bench.assert_right()
        bench.assert_clean()
    assert steps[0] <= 3 * steps[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("free", range(4))
def test_all_want_a_page_in_the_same_step(free: int, overlap: bool) -> None:
    """SCH-09: the pool is nearly full; whoever finds no page is sent back, none goes without."""
    pool = 4 * (24 + free)
    bench = Bench(pool_tokens=pool, page_size=4, chunk=64, ratio=0.01, overlap=overlap)
    for seed in range(4):
        bench.submit(prompt(11, seed), 20, ignore_eos=True)
    bench.step()
    assert len(bench.running()) == 4
    while not bench.scheduler.totals.retractions:
        assert bench.scheduler.stats().used_tokens <= 4 * 24
        assert bench.step()
    assert bench.scheduler.totals.retractions == 1, "its pages are enough for the others"
    assert bench.scheduler.totals.violations == 0
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_the_last_request_that_decodes_always_has_room() -> None:
    """SCH-02, SCH-21: refused at the door or served to its clipped limit; never in between."""
    bench = Bench(pool_tokens=64)
    refused = bench.submit(prompt(64), 1)
    clipped = bench.submit(prompt(40), 100, ignore_eos=True)
    after = bench.submit(prompt(10, 2), 5)
    bench.run()
    assert bench.finishes[refused].status == 400
    assert len(bench.answers[clipped]) == 24
    bench.assert_right(clipped, after)
    assert bench.scheduler.totals.retractions == 0
    bench.assert_clean()
