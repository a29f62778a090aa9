"""What is kept free for answers to come: by ratio, by forecast, and what both have in common."""

import random
from array import array
from itertools import pairwise

import pytest
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.admission import Admission
from tokenloom.scheduler_proc.core.kv_cache import KVCache
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.reserve import CLIP, STARTS, ForecastReserve
from tokenloom.wire.messages import Finish
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

PAGE = 16
BOTH = pytest.mark.parametrize("admission", ["ratio", "quantile"])


def waiting(number: int, length: int, max_new: int) -> Req:
    ids = array("i", [number * 1000 + i for i in range(length)])
    return Req(number, number, SamplingParams(), ids, length, max_new, frozenset())


def forecast(lengths: list[int], risk: float) -> Admission:
    admission = Admission(SchedulingConfig(admission="quantile", retraction_risk=risk))
    for length in lengths:
        req = waiting(1, 1, 10_000)
        req.ids.extend([0] * length)
        admission.after_end(req, Finish("stop"))
    return admission


def start_as_many_as_fit(admission: Admission, kv: KVCache, prompt_len: int) -> list[Req]:
    running: list[Req] = []
    reserve = admission.reserve(kv, running)
    assert isinstance(reserve, ForecastReserve)
    while True:
        req = waiting(len(running) + 1, prompt_len, 10_000)
        match = kv.match(req)
        if not reserve.take(req, match):
            return running
        kv.admit(req, match)
        assert req.kv is not None
        assert kv.grow(req.kv, prompt_len)
        running.append(req)


def cache(num_pages: int) -> KVCache:
    settings = SchedulingConfig(page_size=PAGE, max_running_requests=1000)
    return KVCache(settings, num_pages + 1)


def peak(prompt_len: int, ends: list[int]) -> int:
    """Most pages at any time when requests that start together end after so many tokens."""
    moments = sorted(set(ends))
    return max(sum(-(-(prompt_len + now) // PAGE) for end in ends if end >= now) for now in moments)


@pytest.mark.parametrize("risk", [0.5, 0.05, 0.001])
@pytest.mark.parametrize("kind", ["geometric", "constant", "two kinds"])
def test_the_pool_is_outgrown_no_more_often_than_allowed(risk: float, kind: str) -> None:
    """Fill a pool at once, then let answers end as those before did: the promise, by trial."""
    draw = random.Random(f"{kind} {risk}")

    def length() -> int:
        if kind == "geometric":
            return 1 + int(draw.expovariate(1 / 150))
        return 200 if kind == "constant" or draw.random() < 0.3 else 20

    kv = cache(1000)
    admission = forecast([length() for _ in range(1500)], risk)
    running = start_as_many_as_fit(admission, kv, 50)
    trials = 200
    broken = sum(peak(50, [length() for _ in running]) > kv.pages.capacity for _ in range(trials))
    assert broken <= trials * risk
    assert len(running) >= 35, "ten thousand tokens each would let one run"


def test_less_risk_is_fewer_requests() -> None:
    counts = []
    for risk in (0.5, 0.05, 0.001):
        draw = random.Random(7)
        admission = forecast([draw.randint(1, 300) for _ in range(600)], risk)
        counts.append(len(start_as_many_as_fit(admission, cache(500), 20)))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_retraction_teaches_the_ratio() -> None:
    admission = Admission(SchedulingConfig(schedule_conservativeness=0.1))
    survivor = waiting(1, 4, 99)
    survivor.ids.extend([0] * 30)
    admission.after_decodes([survivor], retracted=True)
    assert admission.ratio.value == (30 + 20) / 100


def test_shared_pages_count_once() -> None:
    """Running requests that share most of their prompts leave room accordingly."""
    admission = forecast([16] * 200, 0.05)
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
    for admission in (Admission(SchedulingConfig()), forecast([400] * 100, 0.05)):
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
    for admission in (Admission(SchedulingConfig()), forecast([16] * 200, 0.05)):
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
    for admission in (Admission(SchedulingConfig()), forecast([16] * 200, 0.05)):
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


@pytest.mark.parametrize("prompt_len", [1, 16, 17])
def test_what_one_request_may_need_in_all(prompt_len: int) -> None:
    kv = cache(20)
    first = waiting(1, prompt_len, 100)
    start(kv, first, prompt_len)
    reserve = forecast([16] * 200, 0.05).reserve(kv, [first])
    assert isinstance(reserve, ForecastReserve)
    assert reserve._limit == kv.pages_for(prompt_len + 100)


def test_the_needs_ahead_are_the_sum_of_what_each_may_need() -> None:
    """Reckoned request by request, without putting together those that are alike."""
    draw = random.Random(5)
    admission = forecast([draw.randint(1, 400) for _ in range(200)], 0.05)
    lengths = admission._lengths
    assert lengths is not None
    kv = cache(1000)
    running: list[Req] = []
    for number in range(1, 41):
        req = waiting(number, draw.randint(1, 90), draw.choice((3, 40, 700, 9000)))
        req.ids.extend([0] * draw.randrange(min(req.max_new_tokens, 300)))
        start(kv, req, len(req.ids))
        req.retractions = 2 * (number % 8 == 0)
        running.append(req)
    candidate = waiting(99, 33, 500)
    reserve = admission.reserve(kv, running)
    assert isinstance(reserve, ForecastReserve)
    assert reserve.take(candidate, kv.match(candidate))
    sure = limit = 0.0
    means, variances = [0.0] * len(STARTS), [0.0] * len(STARTS)
    for req in [*running, candidate]:
        own = kv.pages_for(len(req.ids))
        limit += kv.pages_for(len(req.ids) + req.tokens_left)
        if req.retractions:
            sure += kv.pages_for(len(req.ids) + req.tokens_left)
            continue
        left = min(req.tokens_left, CLIP)
        alive = lengths.outlook(lengths.age(req.output_len))
        for window, (begin, end) in enumerate(pairwise([*STARTS, CLIP])):
            whole = kv.pages_for(len(req.ids) + left)
            need = own + end / PAGE if end < left else float(whole)
            if begin < left:
                means[window] += alive[window] * need
                variances[window] += alive[window] * (1 - alive[window]) * need**2
    assert (reserve._sure, reserve._limit) == (sure, limit)
    assert reserve._means == pytest.approx(means)
    assert reserve._variances == pytest.approx(variances)


@BOTH
def test_a_protected_request_is_sure_of_its_whole_limit(admission: str) -> None:
    chosen = forecast([1] * 300, 0.5) if admission == "quantile" else Admission(SchedulingConfig())
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


@BOTH
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_more_work_than_pool(admission: str, page_size: int) -> None:
    """SCH-01, SCH-08: as if each were alone, few retractions, at most three times the steps."""
    steps = []
    for pool in (512, 2048):
        bench = Bench(
            pool_tokens=pool, page_size=page_size, chunk=64, ratio=0.01, admission=admission
        )
        if admission == "quantile":
            bench.learn([5] * 50)  # which is far too short
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


@BOTH
def test_the_last_request_that_decodes_always_has_room(admission: str) -> None:
    """SCH-02, SCH-21: refused at the door or served to its clipped limit; never in between."""
    bench = Bench(pool_tokens=64, admission=admission)
    if admission == "quantile":
        bench.learn([200] * 50)
    refused = bench.submit(prompt(64), 1)
    clipped = bench.submit(prompt(40), 100, ignore_eos=True)
    after = bench.submit(prompt(10, 2), 5)
    bench.run()
    assert bench.finishes[refused].status == 400
    assert len(bench.answers[clipped]) == 24
    bench.assert_right(clipped, after)
    assert bench.scheduler.totals.retractions == 0
    bench.assert_clean()


def test_learned_lengths_let_more_run_and_spare_retractions() -> None:
    """Limits of 200 and answers of 10: the ratio starts few at first, the forecast nearly all."""
    running = {}
    for admission in ("ratio", "quantile"):
        bench = Bench(pool_tokens=512, max_running=16, chunk=0, admission=admission)
        if admission == "quantile":
            bench.learn([10] * 100)
        for seed in range(16):
            bench.submit(prompt(10, seed), 200)
        bench.step()
        running[admission] = len(bench.running())
        bench.run()
        bench.assert_right()
    assert running["ratio"] < 6 < 12 < running["quantile"]


def test_answers_that_reach_their_limit_are_expected_to_do_so() -> None:
    bench = Bench(pool_tokens=512, max_running=16, admission="quantile")
    bench.learn([100] * 200, cut=True)
    for seed in range(16):
        bench.submit(prompt(10, seed), 100, ignore_eos=True)
    bench.run()
    assert bench.scheduler.totals.retractions == 0
    bench.assert_right()


def test_the_scheduler_feeds_what_it_sees_to_the_model() -> None:
    bench = Bench(pool_tokens=2048, max_running=16, admission="quantile")
    model = bench.scheduler._admission._lengths
    assert model is not None
    for seed in range(40):
        bench.submit(prompt(6, seed), 5, ignore_eos=True)
    never = bench.submit(prompt(6, 99), 5)
    bench.abort(never)
    bench.run()
    assert model.ready
    assert sum(model._seen) == pytest.approx(sum(model._seen[3:6])), "all had five tokens"
    assert sum(model._ended) == 0, "and were cut by their limit"
