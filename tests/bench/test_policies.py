"""The studies of the scheduler's flags: they run, say the same again, and show what we claim."""

import pytest

from tokenloom.bench.policies import STUDIES, main, of, overtakes, play, ttft
from tokenloom.bench.policy_workloads import COLD, STEADY, flood, multi_turn, starvation
from tokenloom.wire.scheduling_config import SchedulingConfig


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_prints_one_table_and_the_same_again(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "--scale", "0.04"])
    first = capsys.readouterr().out
    main([name, "--scale", "0.04"])
    assert capsys.readouterr().out == first
    lines = [line for line in first.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) >= 6


@pytest.mark.parametrize("bound", [16, 64])
def test_cold_requests_under_lpm_are_overtaken_so_often_and_no_more(bound: int) -> None:
    settings = SchedulingConfig(schedule_policy="lpm", max_overtakes=bound)
    driver = play(starvation(0.2), settings)
    assert overtakes(driver, [course.rid for course in of(driver, COLD)]) == bound


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_flood_costs_another_tenant_little(policy: str) -> None:
    crowd = flood(0.25)
    fair = play(crowd, SchedulingConfig(schedule_policy=policy, fairness="vtc"))  # type: ignore[arg-type]
    unfair = play(crowd, SchedulingConfig(schedule_policy=policy))  # type: ignore[arg-type]
    assert ttft(of(fair, STEADY)).max < 0.5
    assert ttft(of(unfair, STEADY)).p50 > 2.0
    assert fair.report().output_tok_s > 0.98 * unfair.report().output_tok_s


def test_each_turn_of_a_chat_comes_after_the_answer_before_it() -> None:
    driver = play(multi_turn(0.04), SchedulingConfig())
    assert len(driver.courses) == 6 * 6
    assert driver.report().finished == {"stop": 36}
    assert driver.report().hit_rate > 0.5
