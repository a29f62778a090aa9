"""Workload generators: the same for a seed, of the lengths asked for, and shared where they say."""

import itertools
import random
from collections.abc import Callable

import pytest

from tokenloom.bench.workloads import (
    Closed,
    Session,
    Shape,
    Source,
    Stream,
    chats,
    even,
    independent,
    long_prompts,
    poisson,
    shared_prefix,
)

GENERATORS: list[Callable[[Source], object]] = [
    lambda source: independent(source, 5, Shape(20, 7, 0.5)),
    lambda source: shared_prefix(source, 5, Shape(20, 7), prefix=9, groups=2),
    lambda source: chats(source, 3, Shape(20, 7), turns=3),
    lambda source: poisson(source, 3.0, 5),
]


@pytest.mark.parametrize("generate", GENERATORS)
def test_a_seed_decides_everything(generate: Callable[[Source], object]) -> None:
    state = random.getstate()
    first = generate(Source(1))
    assert generate(Source(1)) == first
    assert generate(Source(2)) != first
    assert random.getstate() == state, "draws from generators of its own"


def lengths(sessions: tuple[Session, ...]) -> set[tuple[int, int]]:
    return {(len(turn.tokens), turn.max_tokens) for session in sessions for turn in session}


def test_independent_requests_have_the_lengths_and_nothing_in_common() -> None:
    sessions = independent(Source(1), 20, Shape(128, 64))
    assert lengths(sessions) == {(128, 64)}
    assert len({session[0].tokens[:4] for session in sessions}) == 20
    other = independent(Source(1), 20, Shape(128, 64), name="other")
    assert not {s[0].tokens for s in sessions} & {s[0].tokens for s in other}


def test_spread_lengths_stay_within_their_bounds_and_vary() -> None:
    sessions = independent(Source(1), 400, Shape(100, 10, spread=0.5))
    prompts = {prompt for prompt, _ in lengths(sessions)}
    answers = {answer for _, answer in lengths(sessions)}
    assert min(prompts) >= 50
    assert max(prompts) <= 150
    assert len(prompts) > 60
    assert answers == set(range(5, 16))


def test_shared_prefixes_are_shared_within_their_group_alone() -> None:
    sessions = shared_prefix(Source(1), 6, Shape(8, 4), prefix=16, groups=2)
    assert lengths(sessions) == {(24, 4)}
    fronts = [session[0].tokens[:16] for session in sessions]
    assert fronts == [fronts[0], fronts[1]] * 3
    assert fronts[0] != fronts[1]
    assert len({session[0].tokens[16:] for session in sessions}) == 6


def test_chats_have_turns_with_something_to_stand_for_the_answers() -> None:
    (chat,) = chats(Source(1), 1, Shape(96, 64), turns=4)
    assert len(chat) == 4
    assert lengths((chat,)) == {(96, 64)}
    assert {len(turn.stand_in) for turn in chat} == {64}
    assert len({turn.tokens for turn in chat}) == 4


def test_tokens_come_from_the_alphabet() -> None:
    (session,) = independent(Source(1, alphabet=(5, 7)), 1, Shape(50, 1))
    assert set(session[0].tokens) == {5, 7}


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = poisson(Source(1), rate=4.0, count=4000).times
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.05)
    # Standard deviation and mean of an exponential distribution are the same.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.1
    )


def test_even_arrivals() -> None:
    assert even(2.0, 3, start=1.0).times == (1.0, 3.0, 5.0)


def test_long_prompts_arrive_while_the_rest_goes_on_behind() -> None:
    source = Source(1)
    decode = Stream("decode", independent(source, 4, Shape(8, 32)), Closed(2))
    steady, arriving = long_prompts(source, decode, even(1.0, 3), Shape(100, 2))
    assert (steady.background, arriving.background) == (True, False)
    assert lengths(arriving.sessions) == {(100, 2)}
    fronts = {session[0].tokens[:8] for session in steady.sessions}
    assert not fronts & {session[0].tokens[:8] for session in arriving.sessions}
