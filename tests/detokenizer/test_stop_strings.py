"""StopMatcher against str.find on the whole text, for every way to cut the text."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.detokenizer_proc.stop_strings import StopMatcher


def naive(text: str, stops: list[str], least: int = 0) -> tuple[str, str | None]:
    """The stop that is complete first, the longest of several: its text in front and itself.

    What is complete within the first `least` characters does not count.
    """
    starts = {stop: text.find(stop, max(0, least + 1 - len(stop))) for stop in stops}
    found = [(at + len(stop), -len(stop), stop) for stop, at in starts.items() if at >= 0]
    if not found:
        return text, None
    end, minus_length, stop = min(found)
    return text[: end + minus_length], stop


def run(pieces: list[str], stops: list[str], least: int = 0) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    delivered, pushed = "", 0
    for piece in pieces:
        pushed += len(piece)
        text, stop = matcher.push(piece, may_end=pushed > least)
        delivered += text
        if stop is not None:
            return delivered, stop
        pending = "".join(pieces)
        assert pending.startswith(delivered)
    return delivered + matcher.flush(), None


def cut(text: str, borders: list[int]) -> list[str]:
    places = [0, *sorted(at % (len(text) + 1) for at in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 100), max_size=12),
)
@settings(max_examples=800, deadline=None)
def test_equals_find_on_the_whole_text(text: str, stops: list[str], borders: list[int]) -> None:
    assert run(cut(text, borders), stops) == naive(text, stops)


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 24),
)
@settings(max_examples=400, deadline=None)
def test_matches_that_are_complete_too_early_are_passed_over(
    text: str, stops: list[str], least: int
) -> None:
    assert run(list(text), stops, least) == naive(text, stops, least)


@given(st.text("ab", max_size=16), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_holds_back_no_more_than_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    delivered = ""
    for at, char in enumerate(text):
        piece, stop = matcher.push(char)
        delivered += piece
        if stop is not None:
            return
        rest = text[len(delivered) : at + 1]
        tails = [text[start : at + 1] for start in range(at + 1)]
        live = [tail for tail in tails if any(s.startswith(tail) for s in stops)]
        assert rest == max(live, key=len, default="")


@pytest.mark.parametrize("pieces", [["He", "llo wo", "rld"], ["Hello world"], list("Hello world")])
def test_txt_01_a_stop_need_not_meet_token_borders(pieces: list[str]) -> None:
    assert run(pieces, ["lo w"]) == ("Hel", "lo w")


def test_txt_02_nothing_of_a_split_stop_is_streamed() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hi\nUser") == ("Hi", None)
    assert matcher.push(":") == ("", "\nUser:")


def test_a_false_start_is_delivered() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("xaa") == ("x", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("c") == ("aac", None)
    assert matcher.flush() == ""


def test_the_first_complete_stop_wins_and_the_longest_of_equals() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["xabc"], ["c", "abc", "bc"]) == ("x", "abc")
    assert run(["no"], []) == ("no", None)


def naive_with_hidden(text: str, stops: list[str]) -> tuple[str, str | None]:
    """As `naive`, with every H hidden: a stop that holds one is looked for in all of the text."""
    for end in range(1, len(text) + 1):
        whole, shown = text[:end], text[:end].replace("H", "")
        for stop in sorted(stops, key=len, reverse=True):
            if "H" in stop and whole.endswith(stop):
                return whole.removesuffix(stop).replace("H", ""), stop
            if "H" not in stop and text[end - 1] != "H" and shown.endswith(stop):
                return shown.removesuffix(stop), stop
    return text.replace("H", ""), None


@given(
    st.text("abH", max_size=24),
    st.lists(st.text("abH", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 100), max_size=12),
)
@settings(max_examples=800, deadline=None)
def test_hidden_text_counts_for_the_stops_that_hold_it(
    text: str, stops: list[str], borders: list[int]
) -> None:
    matcher = StopMatcher(stops, ["H"])
    delivered = ""
    expected = naive_with_hidden(text, sorted(stops))
    for piece in cut(text, borders):
        for part in re.findall("H+|[^H]+", piece):
            out, stop = matcher.push(part, shown="H" not in part)
            delivered += out
            if stop is not None:
                assert (delivered, stop) == expected
                return
    assert (delivered + matcher.flush(), None) == expected
