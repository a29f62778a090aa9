"""Streams: each request's rows in, its text and exactly one terminal StrOut out."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.detokenizer_proc.streams import Streams
from tokenloom.wire.messages import (
    AbortReq,
    Finish,
    StopMatched,
    StreamOpen,
    StrOut,
    TokenIDOut,
)

END = 0x110000  # a special token: no text unless it is asked for
BROKEN = -1


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """An id is a code point."""
    if BROKEN in ids:
        raise RuntimeError("no such id")
    special = "" if skip_special_tokens else "<end>"
    return "".join(special if i == END else chr(i) for i in ids)


def opened(*stop: str, skip: bool = True, keep: bool = False, least: int = 0) -> StreamOpen:
    return StreamOpen(array("i", [65]).tobytes(), stop, skip, keep, least)


def row(
    text: str, finish: Finish | None = None, start: StreamOpen | None = None, rid: int = 1
) -> TokenIDOut:
    return TokenIDOut(rid, tuple(map(ord, text)), finish, 3, start)


LENGTH = Finish("length")


def test_text_flows_until_the_terminal_row_deletes_the_stream() -> None:
    streams = Streams(decode)
    first = streams.take([row("ab", start=opened())])
    assert first.rows == [StrOut(1, "ab", (97, 98), None, 3)]
    last = streams.take([row("c", LENGTH)])
    assert last.rows == [StrOut(1, "c", (99,), LENGTH, 3)]
    assert first.to_scheduler == last.to_scheduler == []
    assert len(streams) == 0


def test_txt_03_nothing_after_the_match_leaks() -> None:
    streams = Streams(decode)
    outcome = streams.take([row("xEN", start=opened("END"))])
    assert outcome.rows[0].text == "x"
    outcome = streams.take([row("Dyz")])
    assert outcome.rows == [StrOut(1, "", (ord("D"),), Finish("stop", matched="END"), 3)]
    assert outcome.to_scheduler == [StopMatched(1)]
    assert streams.take([row("more")]).rows == []
    assert streams.take([row("end", Finish("stop"))]).rows == []
    assert (len(streams), streams.unknown_rows) == (0, 0)


@pytest.mark.parametrize(("keep", "text"), [(False, "x"), (True, "xEND")])
def test_txt_04_stop_text_is_cut_or_kept_once(keep: bool, text: str) -> None:
    streams = Streams(decode)
    outcome = streams.take([row("xENDy", LENGTH, opened("END", keep=keep))])
    assert outcome.rows == [StrOut(1, text, row("xEND").token_ids, Finish("stop", "END"), 3)]
    assert outcome.to_scheduler == []
    assert len(streams) == 0


@pytest.mark.parametrize("step", [1, 2, 7])
@pytest.mark.parametrize(
    ("least", "text"),
    [
        (0, ""),
        (1, ""),
        (2, "ab-"),  # the first match is complete with the second token
        (4, "ab-"),
        (5, "ab-ab-"),  # as is the second one with the fifth
        (6, "ab-ab-"),
        (8, "ab-ab-abc"),
    ],
)
def test_a_stop_string_within_the_least_tokens_does_not_count(
    step: int, least: int, text: str
) -> None:
    streams, whole = Streams(decode), "ab-ab-abc"
    rows = [row(whole[at : at + step]) for at in range(0, len(whole), step)]
    outcomes = [streams.take([each]) for each in (row("", start=opened("ab", least=least)), *rows)]
    outs = [out for outcome in outcomes for out in outcome.rows]
    assert "".join(out.text for out in outs) == text
    stopped = [out.finish for out in outs if out.finish is not None]
    assert stopped == [Finish("stop", matched="ab")][: least < 8]
    told = [message for outcome in outcomes for message in outcome.to_scheduler]
    assert told == [StopMatched(1)][: least < 8]
    if stopped:
        assert sum(len(out.token_ids) for out in outs) > least


def test_a_stop_string_may_begin_within_the_least_tokens() -> None:
    streams = Streams(decode)
    assert streams.take([row("xa", start=opened("ab", least=2))]).rows[0].text == "x"
    outcome = streams.take([row("b")])
    assert outcome.rows == [StrOut(1, "", (98,), Finish("stop", "ab"), 3)]


def test_an_answer_that_is_its_least_tokens_long_keeps_a_stop_string_at_its_end() -> None:
    outcome = Streams(decode).take([row("xab", LENGTH, opened("ab", least=3))])
    assert outcome.rows == [StrOut(1, "xab", row("xab").token_ids, LENGTH, 3)]


def test_a_held_back_tail_is_flushed_by_any_other_end() -> None:
    for finish in (LENGTH, Finish("abort", message="gone", status=499)):
        streams = Streams(decode)
        assert streams.take([row("xEN", start=opened("END"))]).rows[0].text == "x"
        assert streams.take([row("", finish)]).rows == [StrOut(1, "EN", (), finish, 3)]


@pytest.mark.parametrize(("keep", "text"), [(False, "a"), (True, "a.")])
def test_a_stop_token_is_text_only_when_kept(keep: bool, text: str) -> None:
    finish = Finish("stop", matched=ord("."))
    outcome = Streams(decode).take([row("a.", finish, opened(keep=keep))])
    assert outcome.rows == [StrOut(1, text, row("a.").token_ids, finish, 3)]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_txt_10_special_tokens(skip: bool, text: str) -> None:
    start = opened(skip=skip)
    rows = [TokenIDOut(1, (97, END, 98), LENGTH, 0, start)]
    assert Streams(decode).take(rows).rows[0].text == text


def with_special() -> Streams:
    return Streams(decode, {END: "<end>"})


@pytest.mark.parametrize("chunks", [[(97, 98, END, 99)], [(97,), (98,), (END,), (99,)]])
@pytest.mark.parametrize(
    ("stop", "keep", "text"),
    [
        ("<end>", False, "ab"),
        ("<end>", True, "ab<end>"),
        ("b<end>", False, "a"),
        ("<end>c", False, "ab"),
        ("abc", False, ""),  # in what is shown
        ("ab<end>x", False, "abc"),
    ],
)
def test_a_stop_string_may_hold_a_special_token_that_is_not_shown(
    chunks: list[tuple[int, ...]], stop: str, keep: bool, text: str
) -> None:
    streams = with_special()
    streams.take([row("", start=opened(stop, keep=keep))])
    rows = [TokenIDOut(1, ids) for ids in chunks] + [TokenIDOut(1, (), LENGTH)]
    outs = [out for each in rows for out in streams.take([each]).rows]
    assert "".join(out.text for out in outs) == text
    ends = [out.finish for out in outs if out.finish is not None]
    assert ends == [LENGTH if text == "abc" else Finish("stop", matched=stop)]


@pytest.mark.parametrize(("stop", "text"), [("<end>", "ab"), ("b<end>", "a")])
def test_a_stop_string_may_hold_the_token_that_ended_the_answer(stop: str, text: str) -> None:
    rows = [TokenIDOut(1, (97, 98, END), Finish("stop", matched=END), 0, opened(stop))]
    (out,) = with_special().take(rows).rows
    assert (out.text, out.finish) == (text, Finish("stop", matched=stop))


def test_an_empty_row_says_nothing_and_a_silent_id_is_reported() -> None:
    streams = Streams(decode)
    assert streams.take([row("", start=opened())]).rows == []
    assert streams.take([TokenIDOut(1, (END,))]).rows == [StrOut(1, "", (END,), None, 3)]


def test_a_failure_ends_its_own_stream_only() -> None:
    streams = Streams(decode)
    streams.take([row("a", start=opened()), row("b", start=opened(), rid=2)])
    outcome = streams.take([TokenIDOut(1, (BROKEN,)), row("c", rid=2)])
    failed, fine = outcome.rows
    assert failed.finish is not None
    assert (failed.finish.reason, failed.finish.status) == ("error", 500)
    assert "no such id" in failed.finish.message
    assert fine.text == "c"
    assert outcome.to_scheduler == [AbortReq(1)]
    assert streams.take([row("x"), row("", Finish("abort"))]).rows == []
    assert len(streams) == 1


def test_a_failure_on_the_terminal_row_needs_no_abort() -> None:
    streams = Streams(decode)
    outcome = streams.take([TokenIDOut(1, (BROKEN,), LENGTH, 0, opened())])
    assert [out.finish is not None and out.finish.reason for out in outcome.rows] == ["error"]
    assert outcome.to_scheduler == []
    assert len(streams) == 0


def test_a_malformed_opening_ends_that_stream() -> None:
    outcome = Streams(decode).take([TokenIDOut(1, (97,), None, 0, StreamOpen(b"abc"))])
    assert outcome.rows[0].finish is not None
    assert outcome.to_scheduler == [AbortReq(1)]


def test_rows_of_unknown_rids_are_dropped_and_counted() -> None:
    streams = Streams(decode)
    assert streams.take([row("a"), row("b", LENGTH, rid=9)]).rows == []
    assert streams.unknown_rows == 2


def test_a_refusal_is_passed_on() -> None:
    finish = Finish("abort", message="draining", status=503)
    outcome = Streams(decode).take([row("", finish, StreamOpen(b""))])
    assert outcome.rows == [StrOut(1, "", (), finish, 3)]


@given(
    st.lists(st.text("abE", max_size=4), max_size=8),
    st.lists(st.text("abE", min_size=1, max_size=3), max_size=2),
    st.sampled_from([LENGTH, Finish("stop", matched=END), Finish("abort")]),
)
@settings(max_examples=300, deadline=None)
def test_exactly_one_terminal_row(steps: list[str], stops: list[str], finish: Finish) -> None:
    streams = Streams(decode)
    rows = [row("", start=opened(*stops)), *map(row, steps), row("ab", finish)]
    outcomes = [streams.take([each]) for each in rows]
    outs = [out for outcome in outcomes for out in outcome.rows]
    assert [out.finish is not None for out in outs].count(True) == 1
    assert outs[-1].finish is not None
    assert sum(len(outcome.to_scheduler) for outcome in outcomes) <= 1
    assert (len(streams), streams.unknown_rows) == (0, 0)
    text, whole = "".join(out.text for out in outs), "".join(steps) + "ab"
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    if not any(stop in whole for stop in stops):
        assert text == whole
