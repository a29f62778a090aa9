"""Who gives way when the pool is full, one criterion at a time."""

from array import array

from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.retraction import choose_victim
from tokenloom.wire.sampling import SamplingParams


def req(arrival: int, *, generated: int = 0, retractions: int = 0) -> Req:
    return Req(
        rid=arrival,
        arrival=arrival,
        sampling=SamplingParams(),
        ids=array("i", [1] * (4 + generated)),
        prompt_len=4,
        max_new_tokens=50,
        stop_ids=frozenset(),
        retractions=retractions,
    )


def test_the_least_generated_work_goes_first() -> None:
    least = req(2, generated=3)
    assert choose_victim([req(1, generated=9), least, req(3, generated=5)]) is least


def test_of_equal_work_the_newest_goes_first() -> None:
    newest = req(7, generated=3)
    assert choose_victim([req(1, generated=3), newest, req(4, generated=3)]) is newest


def test_the_protected_go_last() -> None:
    other = req(1, generated=40)
    assert choose_victim([req(2, retractions=2), other, req(3, retractions=9)]) is other
    once = req(5, retractions=1)
    assert choose_victim([req(1, generated=1), once]) is once
    newest = req(3, retractions=2)
    assert choose_victim([req(2, retractions=2), newest]) is newest


def test_the_only_one_stays() -> None:
    assert choose_victim([req(1)]) is None
    assert choose_victim([]) is None
