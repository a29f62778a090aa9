"""What is learned of the time that steps take: right, robust, never negative, the same again."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.scheduler_proc.core.step_times import PRIOR, StepTimes

GPU = (8e-3, 0.02e-3, 0.03e-3)
CPU = (3e-3, 0.6e-3, 0.22e-3)
Coefficients = tuple[float, float, float]


def seconds_of(truth: Coefficients, decodes: int, prompt_tokens: int) -> float:
    step, decode, token = truth
    return step + decode * decodes + token * prompt_tokens


def learned(times: StepTimes) -> Coefficients:
    return times.step, times.decode, times.prompt_token


def sizes(random: Random) -> tuple[int, int]:
    """A mixed life: some steps only decode, some only compute prompts, most do both."""
    kind = random.random()
    decodes = 0 if kind < 0.2 else random.randint(1, 64)
    prompt_tokens = 0 if 0.2 <= kind < 0.5 else random.randint(1, 512)
    return decodes, prompt_tokens


def live(times: StepTimes, truth: Coefficients, steps: int, noise: float = 0.0) -> None:
    random = Random(5)
    for _ in range(steps):
        decodes, tokens = sizes(random)
        off = math.exp(random.gauss(0.0, noise))
        times.observe(decodes, tokens, off * seconds_of(truth, decodes, tokens))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("truth", [GPU, CPU])
def test_finds_the_coefficients_however_far_they_are_from_the_prior(
    truth: Coefficients, scale: float
) -> None:
    times = StepTimes()
    scaled = (truth[0] * scale, truth[1] * scale, truth[2] * scale)
    live(times, scaled, 300)
    assert learned(times) == pytest.approx(scaled, rel=0.05)


@pytest.mark.parametrize("truth", [GPU, CPU])
def test_is_near_after_a_few_steps(truth: Coefficients) -> None:
    times = StepTimes()
    live(times, truth, 12)
    for decodes, tokens in [(8, 0), (32, 100), (0, 512)]:
        assert times.predict(decodes, tokens) == pytest.approx(
            seconds_of(truth, decodes, tokens), rel=0.25
        )


def test_noise_averages_out() -> None:
    times = StepTimes()
    live(times, CPU, 500, noise=0.2)
    assert times.predict(32, 0) == pytest.approx(seconds_of(CPU, 32, 0), rel=0.15)
    assert times.predict(32, 256) == pytest.approx(seconds_of(CPU, 32, 256), rel=0.15)


def test_a_cold_first_step_of_each_kind_is_soon_forgotten() -> None:
    """Kernels are compiled and memory is touched for the first time: a hundred times too long."""
    times = StepTimes()
    for decodes, tokens in [(0, 512), (1, 0), (1, 64)]:
        times.observe(decodes, tokens, 100 * seconds_of(CPU, decodes, tokens))
    live(times, CPU, 60)
    assert times.predict(8, 0) == pytest.approx(seconds_of(CPU, 8, 0), rel=0.2)
    assert times.predict(8, 64) == pytest.approx(seconds_of(CPU, 8, 64), rel=0.2)


@pytest.mark.parametrize("factor", [50.0, 1e6, 1e-6])
def test_outliers_move_it_little(factor: float) -> None:
    times = StepTimes()
    live(times, CPU, 200)
    for number in range(100):
        times.observe(16, 64, seconds_of(CPU, 16, 64) * (factor if number % 20 == 0 else 1.0))
        assert 0.75 < times.predict(16, 64) / seconds_of(CPU, 16, 64) < 1.35


def test_a_result_that_is_read_late_makes_a_long_step_and_a_short_one() -> None:
    times = StepTimes()
    live(times, GPU, 200)
    for _ in range(50):
        times.observe(32, 0, 1.9 * seconds_of(GPU, 32, 0))
        times.observe(32, 0, 0.1 * seconds_of(GPU, 32, 0))
    assert 0.6 < times.predict(32, 0) / seconds_of(GPU, 32, 0) < 1.2


@pytest.mark.parametrize("change", [3.0, 1 / 3])
def test_a_lasting_change_is_followed(change: float) -> None:
    times = StepTimes()
    live(times, CPU, 300)
    slower = (CPU[0] * change, CPU[1] * change, CPU[2] * change)
    live(times, slower, 300)
    assert times.predict(32, 0) == pytest.approx(seconds_of(slower, 32, 0), rel=0.15)
    assert times.predict(32, 256) == pytest.approx(seconds_of(slower, 32, 256), rel=0.15)


def test_what_a_prompt_costs_is_known_after_an_hour_of_decodes() -> None:
    times = StepTimes()
    live(times, GPU, 200)
    for number in range(20_000):
        times.observe(30 + number % 5, 0, seconds_of(GPU, 30 + number % 5, 0))
    assert times.prompt_token == pytest.approx(GPU[2], rel=0.1)


def test_steps_of_one_size_are_predicted_though_they_tell_nothing_apart() -> None:
    times = StepTimes()
    for _ in range(500):
        times.observe(32, 64, 0.05)
    assert times.predict(32, 64) == pytest.approx(0.05, rel=0.02)
    assert min(learned(times)) >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_time_is_ignored(seconds: float) -> None:
    times = StepTimes()
    times.observe(4, 16, seconds)
    assert learned(times) == PRIOR


STEPS = st.lists(
    st.tuples(
        st.integers(0, 4096),
        st.integers(0, 1 << 20),
        st.floats(0, 1e300) | st.floats(0, 1) | st.just(1e-9),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_is_measured_no_coefficient_is_negative_and_all_is_finite(
    steps: list[tuple[int, int, float]],
) -> None:
    times, again = StepTimes(), StepTimes()
    for step in steps:
        times.observe(*step)
        assert all(0 <= value < 1e6 for value in learned(times))
        assert 0 < times.predict(4096, 1 << 20) < math.inf
    for step in steps:
        again.observe(*step)
    assert learned(again) == learned(times), "the same steps give the same model"
