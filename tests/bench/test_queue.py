"""The measurement of the waiting queue still drives the scheduler as it is."""

import pytest

from tokenloom.bench.queue import PROMPTS, Load
from tokenloom.wire.scheduling_config import SchedulingConfig


@pytest.mark.parametrize("kind", PROMPTS)
def test_each_pass_plans_a_step_with_the_queue_filled_up(kind: str) -> None:
    load = Load(SchedulingConfig(schedule_policy="lpm", fairness="vtc"), PROMPTS[kind], 20)
    assert len(load.passes(5)) == 5
    load._scheduler.check()
    assert load._rid > 20, "some have started"
