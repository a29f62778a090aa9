"""What the scheduler says first: of a request to the detokenizer, of itself to who asks."""

from array import array

from support.scheduling import Bench

from tokenloom.wire.messages import BatchTokenIDOut, StreamOpen, TokenIDOut, TokenizedGenerateReq
from tokenloom.wire.sampling import SamplingParams

PARAMS = SamplingParams(
    seed=1,
    max_new_tokens=2,
    min_new_tokens=1,
    ignore_eos=True,
    stop=("end",),
    skip_special_tokens=False,
    no_stop_trim=True,
)


def rows_of(prompt: list[int]) -> list[TokenIDOut]:
    """Of a request that is computed in two steps."""
    bench = Bench()
    core = bench.scheduler
    core.handle(TokenizedGenerateReq(1, array("i", prompt).tobytes(), PARAMS))
    rows: list[TokenIDOut] = []
    while batch := core.get_next_batch_to_run():
        for message in core.process_batch_result(bench.runner.run(batch)):
            assert isinstance(message, BatchTokenIDOut)
            rows += message.rows
    return rows


def test_the_first_row_opens_the_stream_with_the_last_eight_ids_of_the_prompt() -> None:
    first, second = rows_of(list(range(1, 21)))
    tail = array("i", range(13, 21)).tobytes()
    assert first.opened == StreamOpen(tail, ("end",), False, True, 1)
    assert second.opened is None


def test_counters_start_at_nothing() -> None:
    stats = Bench(pool_tokens=64).scheduler.stats(3)
    assert (stats.seq, stats.step, stats.running, stats.waiting) == (3, 0, 0, 0)
    assert (stats.free_tokens, stats.used_tokens, stats.evictable_tokens) == (64, 0, 0)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (0, 0)
    assert (stats.generated_tokens_total, stats.retractions_total) == (0, 0)


def test_a_short_prompt_is_told_whole() -> None:
    first, _ = rows_of([5, 6, 7])
    assert first.opened is not None
    assert first.opened.prompt_tail == array("i", [5, 6, 7]).tobytes()
