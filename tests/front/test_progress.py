"""Readiness judged from stamps, on a clock that the tests move."""

import pytest

from tokenloom.tokenizer_proc.progress import (
    LONGEST_TICK_S,
    SILENCE_S,
    SLOWEST_STEP_S,
    TICK_S,
    Progress,
)
from tokenloom.wire.messages import LoopStamp


class Watched:
    """Progress with a scheduler that stamps once a second, unless the test says otherwise."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.now = 1000.0
        self.stamp = LoopStamp(0, True, 0, 0.0, False)
        self.progress.tick(self.now)

    def run(
        self,
        seconds: float,
        *,
        turns: int = 0,
        cpu: float = 0.0,
        heard: bool = True,
        relayed: bool = True,
    ) -> str | None:
        """The problem after so long; `turns` and `cpu` come with each stamp."""
        for tick in range(1, int(seconds / TICK_S) + 1):
            self.now += TICK_S
            self.progress.tick(self.now)
            if tick % 2:
                continue
            if heard:
                stamp = self.stamp
                self.stamp = LoopStamp(
                    stamp.turns + turns, stamp.waiting, stamp.tokens, stamp.cpu_s + cpu, False
                )
                self.progress.stamped(self.stamp)
            if relayed:
                self.progress.relayed()
        return self.progress.problem

    def computes(self, tokens: int) -> None:
        """A step of `tokens` begins."""
        self.stamp = LoopStamp(self.stamp.turns + 1, False, tokens, self.stamp.cpu_s, False)
        self.progress.stamped(self.stamp)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_idle_server_is_ready_for_as_long_as_it_stamps(watched: Watched) -> None:
    assert watched.run(3600.0) is None


def test_stopped_idle_scheduler_shows_within_five_seconds(watched: Watched) -> None:
    watched.run(10.0)
    assert watched.run(SILENCE_S - TICK_S, heard=False, relayed=False) is None
    problem = watched.run(TICK_S, heard=False, relayed=False)
    assert problem == "the scheduler process has not been heard of for 4 s"
    assert watched.run(22.0, heard=False, relayed=False) is not None
    assert watched.run(1.0) is None, "and is forgotten with the first stamp"


def test_stopped_detokenizer_shows_within_five_seconds(watched: Watched) -> None:
    watched.run(10.0)
    problem = watched.run(4.5, relayed=False)
    assert problem == "the detokenizer process has passed nothing on for 4 s"
    assert watched.run(1.0) is None


def test_stop_in_the_middle_of_a_step_shows_like_any_other(watched: Watched) -> None:
    watched.computes(4096)
    watched.run(3.0, cpu=1.9)
    assert "scheduler process" in str(watched.run(4.5, heard=False, relayed=False))


def test_busy_server_is_ready_however_long_its_queue_is(watched: Watched) -> None:
    watched.computes(64)
    assert watched.run(3600.0, turns=3, cpu=1.9) is None


def test_one_long_step_is_work_while_it_uses_the_processor(watched: Watched) -> None:
    watched.computes(4096)
    assert watched.run(41.0, cpu=1.9) is None
    assert watched.run(30.0, cpu=0.05) is None, "neither does a crowded machine make it stuck"
    assert watched.run(2.0, turns=1) is None


def test_step_that_waits_for_ever_shows_within_five_seconds(watched: Watched) -> None:
    watched.computes(64)
    watched.run(10.0, turns=1, cpu=0.9)
    problem = watched.run(5.0, cpu=0.0005)
    assert problem is not None
    assert problem.startswith("the scheduler stands still for")


def test_step_that_never_ends_shows_by_its_size(watched: Watched) -> None:
    watched.computes(10)
    assert watched.run(SLOWEST_STEP_S + 9.0, cpu=1.0) is None
    problem = watched.run(2.0, cpu=1.0)
    assert problem == "the scheduler computes a step of 10 tokens for 71 s"


def test_time_in_which_the_front_itself_stood_still_is_no_silence(watched: Watched) -> None:
    watched.run(2.0)
    watched.now += 22.0
    watched.progress.tick(watched.now)
    assert watched.progress.problem is None
    assert LONGEST_TICK_S < SILENCE_S
    assert watched.run(10.0) is None
