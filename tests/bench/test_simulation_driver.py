"""The driver of the simulated scheduler: what it reports of runs that can be told by hand."""

import pytest

from tokenloom.bench.simulation.driver import Arrival, Driver, Stuck, request
from tokenloom.bench.simulation.hash_model import EOS, VOCAB, HashRunner, Script, hash_answer
from tokenloom.bench.simulation.step_time import StepTime
from tokenloom.scheduler_proc.core.intake import Limits
from tokenloom.scheduler_proc.core.scheduler import Scheduler
from tokenloom.wire.messages import AbortReq
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

SECOND_A_STEP = StepTime(step=1.0, row=0.0, token=0.0, context_token=0.0)


def driver(*, pool_pages: int = 32, rows: int = 2, time: StepTime = SECOND_A_STEP) -> Driver:
    settings = SchedulingConfig(max_running_requests=rows, page_size=4, chunked_prefill_size=16)
    limits = Limits(VOCAB, 128, pool_pages * 4, frozenset({EOS}))
    runner = HashRunner(num_pages=pool_pages + 1, page_size=4, num_rows=rows, budget=16)
    return Driver(Scheduler(settings, limits, pool_pages + 1), runner, time)


def arrival(at: float, rid: int, prompt: list[int], max_new: int) -> Arrival:
    params = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return Arrival(at, request(rid, prompt, params))


def test_times_of_a_run() -> None:
    one = driver(rows=1)
    report = one.run(
        [
            arrival(10.0, 1, [5] * 8, 3),  # steps begin at 10, 11, 12
            arrival(11.5, 2, [5] * 20, 2),  # two chunks less 8 cached tokens: steps at 13, 14
            arrival(40.0, 3, [6], 1),
        ]
    )
    first, second, third = (one.courses[rid] for rid in (1, 2, 3))
    assert (first.wait, first.ttft, first.gaps, first.ended) == (0.0, 1.0, [1.0, 1.0], 13.0)
    assert (second.wait, second.ttft, second.cached_tokens) == (1.5, 2.5, 8)
    assert third.arrived == 40.0
    assert (report.requests, report.steps, report.seconds) == (3, 6, 41.0)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (29, 8, 6)
    assert report.hit_rate == 8 / 29
    assert report.output_tok_s == 6 / 41
    assert report.finished == {"length": 3}
    assert report.wait_s.max == 1.5
    assert report.ttft_s.p50 == 1.0


def test_an_aborted_request_that_never_ran_has_no_times() -> None:
    one = driver(rows=1)
    one.run([arrival(0, 1, [5], 9), arrival(0, 2, [6], 9), Arrival(1.0, AbortReq(2))])
    assert one.courses[2].admissions == []
    assert one.courses[2].ended == 1.0
    assert one.report().finished == {"length": 1, "abort": 1}
    assert one.report().wait_s.count == 1


def test_retractions_are_seen_as_admissions() -> None:
    one = driver(pool_pages=10, rows=4)
    one.scheduler._admission.ratio.value = 0.0
    report = one.run([arrival(0, rid, [rid] * 8, 20) for rid in (1, 2, 3)])
    assert report.retractions == one.scheduler.totals.retractions > 0


def test_a_script_says_when_an_answer_ends() -> None:
    one = driver()
    one.runner.scripts = {1: Script(ends_at=12), 2: Script(salt=9, ends_at=70)}
    prompt = [5] * 8
    for rid in (1, 2):
        one.deliver(request(rid, prompt, SamplingParams()))
    one.run([])
    assert len(one.courses[1].token_times) == 4
    assert len(one.courses[2].token_times) == 62
    assert one.courses[2].finish is not None
    assert one.courses[2].finish.matched == EOS
    answers = [
        hash_answer(prompt, 99, frozenset({EOS}), script) for script in one.runner.scripts.values()
    ]
    assert answers[0][:3] != answers[1][:3], "another salt, another answer"
    assert [answer.index(EOS) for answer in answers] == [3, 61]


def test_the_step_time_is_linear() -> None:
    one = driver(time=StepTime(step=1.0, row=50.0, token=10.0, context_token=0.1))
    one.deliver(request(1, [5] * 8, SamplingParams(max_new_tokens=3)))
    one.launch()
    one.land()
    assert one.now == 1.0 + 80.0
    one.launch()
    one.land()
    assert one.now == 81.0 + 1.0 + 50.0 + 0.8


def test_a_scheduler_that_stands_still_is_not_waited_for() -> None:
    one = driver()
    one.scheduler.get_next_batch_to_run = lambda: None  # type: ignore[method-assign]
    with pytest.raises(Stuck, match="waiting=1"):
        one.run([arrival(0, 1, [5], 1)])
