"""How many prompt tokens join a step that decodes: up to the goal, never none, never too many."""

from array import array
from collections.abc import Callable

import pytest

from tokenloom.bench.policies import CPU, GPU, most_at_once, play
from tokenloom.bench.policy_workloads import Ask, at_once
from tokenloom.bench.simulation.driver import Driver
from tokenloom.bench.simulation.step_time import StepTime
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.schedule_batch import ScheduleBatch
from tokenloom.scheduler_proc.core.step_budget import (
    GAP_FACTOR,
    LEAST_GAP,
    PROBE_AFTER,
    PROGRESS,
    StepBudget,
)
from tokenloom.wire.device_defaults import DEFAULTS
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

POOL = 262_144
STEP, DECODE, TOKEN = 8e-3, 0.02e-3, 0.03e-3


def batch(decodes: int, prompt_tokens: int) -> ScheduleBatch:
    req = Req(1, 1, SamplingParams(), array("i", [5]), 1, 1, frozenset())
    return ScheduleBatch(1, [req] * decodes, [(req, prompt_tokens)] if prompt_tokens else [])


def taught(settings: SchedulingConfig) -> StepBudget:
    """A budget that has seen steps of all sizes on a machine like a GPU."""
    budget = StepBudget(settings)
    for number in range(400):
        decodes, tokens = (0, 8, 64, 200)[number % 4], (0, 100, 2000)[number % 3]
        if decodes or tokens:
            budget.after_step(batch(decodes, tokens), STEP + DECODE * decodes + TOKEN * tokens)
    return budget


def gpu(**flags: object) -> SchedulingConfig:
    sizes = {"max_running_requests": 256, "max_prefill_tokens": 8192, "chunked_prefill_size": 8192}
    return SchedulingConfig(**{**sizes, **flags})  # type: ignore[arg-type]


@pytest.mark.parametrize("decodes", [1, 32, 256])
def test_unset_a_step_may_take_three_times_its_decodes_or_the_least_gap(decodes: int) -> None:
    tokens = taught(gpu()).beside(decodes).tokens
    alone = STEP + DECODE * decodes
    goal = max(LEAST_GAP, GAP_FACTOR * alone)
    assert alone + TOKEN * tokens == pytest.approx(goal, rel=0.05)


@pytest.mark.parametrize("goal_ms", [15.0, 40.0, 200.0])
def test_a_goal_is_kept(goal_ms: float) -> None:
    tokens = taught(gpu(decode_gap_ms=goal_ms)).beside(64).tokens
    assert STEP + DECODE * 64 + TOKEN * tokens == pytest.approx(goal_ms / 1e3, rel=0.05)


@pytest.mark.parametrize("goal_ms", [0.001, 5.0, 9.3])
def test_prompts_get_a_share_of_a_step_whose_decodes_use_up_the_goal(goal_ms: float) -> None:
    tokens = taught(gpu(decode_gap_ms=goal_ms)).beside(64).tokens
    assert TOKEN * tokens == pytest.approx(PROGRESS * (STEP + DECODE * 64), rel=0.05)


def test_never_more_than_the_chunk_holds_and_never_less_than_a_page() -> None:
    slow = SchedulingConfig(page_size=16, decode_gap_ms=1.0)
    budget = StepBudget(slow)
    for _ in range(100):
        budget.after_step(batch(1, 0), 1e-3)
        budget.after_step(batch(1, 64), 10.0)
    assert budget.beside(1).tokens == 16
    assert taught(gpu(decode_gap_ms=60_000.0)).beside(192).tokens == 8000
    assert taught(gpu(decode_gap_ms=60_000.0, max_prefill_tokens=500)).beside(192).tokens == 308
    assert taught(gpu(chunked_prefill_size=512)).beside(0).tokens == 512, "nobody waits for it"


def test_before_anything_is_known_a_step_computes_some_hundred_tokens() -> None:
    assert 100 < StepBudget(gpu()).beside(8).tokens < 400


@pytest.mark.parametrize(
    ("mixed", "decodes", "tokens"),
    [(64, 0, 512), (64, 1, 63), (64, 40, 24), (64, 60, 16), (0, 40, 472), (1000, 40, 472)],
)
def test_a_count_of_tokens_takes_the_place_of_the_goal(
    mixed: int, decodes: int, tokens: int
) -> None:
    budget = StepBudget(SchedulingConfig(mixed_chunk_size=mixed))
    budget.after_step(batch(decodes, 64), 100.0)
    assert budget.beside(decodes).tokens == tokens


def test_prompts_that_are_not_cut_have_the_whole_step() -> None:
    budget = StepBudget(SchedulingConfig(chunked_prefill_size=0))
    assert (budget.beside(40).tokens, budget.beside(40).cuts) == (4096 - 40, False)


def test_after_many_filled_steps_one_shows_what_decodes_take_alone() -> None:
    budget = taught(gpu(page_size=16))

    def step() -> int:
        tokens = budget.beside(32).tokens
        budget.after_step(batch(32, tokens), STEP + DECODE * 32 + TOKEN * tokens)
        return tokens

    pages = [number for number in range(3 * PROBE_AFTER + 3) if step() == 16]
    assert pages == [PROBE_AFTER, 2 * PROBE_AFTER + 1, 3 * PROBE_AFTER + 2]
    budget.after_step(batch(32, 20), STEP + DECODE * 32 + TOKEN * 20)
    assert all(step() > 16 for _ in range(PROBE_AFTER)), "a step with few prompt tokens shows it"


def test_a_step_that_nobody_measured_teaches_nothing() -> None:
    budget = StepBudget(gpu())
    before = budget.beside(8)
    budget.after_step(batch(8, 100), None)
    assert budget.beside(8) == before


def crowd_of_48(settings: SchedulingConfig, step_time: Callable[..., float] = GPU) -> Driver:
    assert isinstance(step_time, StepTime)
    return play(at_once(48, 256, 64), settings, pool_tokens=POOL, step_time=step_time)


def test_a_crowd_runs_up_to_the_limit_of_rows() -> None:
    """48 prompts of 256 tokens with answers of 64: a fixed count of 64 tokens lets 13 run."""
    assert most_at_once(crowd_of_48(SchedulingConfig(mixed_chunk_size=64), CPU)) == 13
    assert most_at_once(crowd_of_48(SchedulingConfig(), GPU)) == 48
    assert most_at_once(crowd_of_48(SchedulingConfig(max_running_requests=32), CPU)) == 32


@pytest.mark.parametrize(("device", "step_time"), [("cuda", GPU), ("cpu", CPU)])
def test_more_throughput_and_earlier_first_tokens_than_a_fixed_count(
    device: str, step_time: StepTime
) -> None:
    settings = DEFAULTS[device]
    fixed = SchedulingConfig(mixed_chunk_size=64)
    before, now = crowd_of_48(fixed, step_time).report(), crowd_of_48(settings, step_time).report()
    assert now.output_tok_s > (1.05 if device == "cpu" else 2.5) * before.output_tok_s
    assert now.ttft_s.p50 < 0.9 * before.ttft_s.p50


@pytest.mark.parametrize("goal_ms", [20.0, 40.0])
def test_gaps_stay_within_the_goal(goal_ms: float) -> None:
    settings = gpu(decode_gap_ms=goal_ms)
    driver = play(at_once(150, 200, 64), settings, pool_tokens=POOL, step_time=GPU)
    gaps = driver.report().inter_token_s
    assert gaps.p99 < 1.05 * goal_ms / 1e3
    assert gaps.p90 > 0.9 * goal_ms / 1e3, "and the goal is used"


def test_streams_that_decode_are_slowed_by_a_long_prompt_to_the_goal_and_no_more() -> None:
    streams = at_once(8, 128, 300)
    long = [Ask(1.0 + n, ask.prompt, 4, 4) for n, ask in enumerate(at_once(3, 1500, 4))]
    settings = SchedulingConfig(decode_gap_ms=25.0)
    driver = play([*streams, *long], settings, pool_tokens=POOL, step_time=CPU)
    gaps = [gap for rid in range(1, 9) for gap in driver.courses[rid].gaps]
    assert max(gaps[8:]) < 1.15 * 25e-3
    assert all(driver.courses[rid].ttft < 1.2 for rid in range(9, 12))


def test_a_goal_that_nothing_fits_still_drains_the_queue() -> None:
    settings = SchedulingConfig(decode_gap_ms=0.01)
    driver = crowd_of_48(settings, CPU)
    assert driver.report().finished == {"stop": 48}
