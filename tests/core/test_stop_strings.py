"""Scheduler and detokenizer together: where an answer with a stop string and a minimum ends."""

from collections.abc import Sequence

import pytest
from support.scheduling import Bench, prompt

from tokenloom.detokenizer_proc.streams import Outcome, Streams
from tokenloom.wire.messages import BatchTokenIDOut, StrOut, ToDetokenizer

STOP = "b"


def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
    return "".join("abcd"[token_id % 4] for token_id in ids)


def play(bench: Bench) -> dict[int, list[StrOut]]:
    """Step until idle, with a detokenizer that tells the scheduler of each match."""
    streams, said = Streams(decode), dict[int, list[StrOut]]()
    note = bench._note

    def take(messages: list[ToDetokenizer]) -> None:
        note(messages)
        for message in messages:
            rows = message.rows if isinstance(message, BatchTokenIDOut) else []
            outcome: Outcome = streams.take(rows)
            for out in outcome.rows:
                said.setdefault(out.rid, []).append(out)
            for matched in outcome.to_scheduler:
                bench.send(matched)

    bench._note = take  # type: ignore[method-assign]
    bench.run()
    assert len(streams) == 0
    return said


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_ends_with_the_first_stop_string_behind_its_least_tokens(overlap: bool) -> None:
    bench = Bench(overlap=overlap, max_running=4, pool_tokens=96)
    least = {
        bench.submit(
            prompt(6, n), 40, ignore_eos=True, stop=(STOP,), min_new_tokens=n, no_stop_trim=True
        ): n
        for n in (0, 1, 3, 10, 20, 39, 40)
    }
    said = play(bench)
    for rid, minimum in least.items():
        whole = decode(bench.expected(rid), True)
        end = whole.find(STOP, minimum)
        text = "".join(out.text for out in said[rid])
        finish = said[rid][-1].finish
        assert finish is not None
        assert text == (whole if end < 0 else whole[: end + 1])
        assert (finish.reason, finish.matched) == (("length", None) if end < 0 else ("stop", STOP))
        assert sum(len(out.token_ids) for out in said[rid]) == len(text) >= minimum
    assert {said[rid][-1].finish.reason for rid in least} == {"stop", "length"}  # type: ignore[union-attr]
    bench.assert_clean()
