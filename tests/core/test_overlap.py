"""Steps that are planned before the result of the one before is known: what they take for granted.

`launch` plans a step, `land` reads the oldest one; the hash model computes it no sooner than that.
Bench checks after each call that every page, lock and row is held once.
"""

import pytest
from support.hash_model import hash_answer
from support.scheduling import Bench, prompt

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.core.req import ReqState
from tokenloom.wire.messages import AbortReq, DrainReq, FlushReq, StopMatched


def decoding(bench: Bench, *lengths: int, max_new: int = 40) -> list[int]:
    """Requests with one token each and no step in flight."""
    rids = [
        bench.submit(prompt(length, seed), max_new, ignore_eos=True)
        for seed, length in enumerate(lengths, 1)
    ]
    bench.launch()
    bench.land()
    assert all(len(bench.answers[rid]) == 1 for rid in rids)
    return rids


def rows_in_flight(bench: Bench) -> list[list[int]]:
    return [launched.batch.rows for launched in bench.in_flight]


def states(bench: Bench) -> dict[int, ReqState]:
    return {rid: req.state for rid, req in bench.scheduler._running.items()}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("reuse", [True, False])
def test_alone_in_a_crowd_cold_and_warm(page_size: int, chunk: int, reuse: bool) -> None:
    bench = Bench(overlap=True, pool_tokens=1024, page_size=page_size, chunk=chunk, reuse=reuse)
    for _ in range(2):
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 65, 200):
            bench.submit(prompt(length), 20)
        bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_a_decode_goes_on_from_a_token_that_nobody_has_read() -> None:
    bench = Bench(overlap=True)
    rid = bench.submit(prompt(6), 3, ignore_eos=True)
    assert bench.launch()
    assert bench.launch()
    batch = bench.in_flight[1].batch
    assert (batch.num_decodes, batch.prefix_lens, list(batch.input_ids)) == (1, [6], [])
    assert rid not in bench.answers
    bench.run()
    bench.assert_right()


def test_an_answer_is_not_planned_beyond_its_limit() -> None:
    """Of three tokens, the second is launched before the first is read, and no fourth ever."""
    bench = Bench(overlap=True)
    rid = bench.submit(prompt(6), 2, ignore_eos=True)
    assert bench.launch()
    assert bench.launch()
    bench.land()
    assert not bench.launch(), "both tokens are on their way"
    bench.land()
    assert bench.finishes[rid].reason == "length"
    assert bench.runner.steps == 2
    bench.assert_clean()


def test_the_last_token_of_a_context_is_not_passed_either() -> None:
    bench = Bench(overlap=True, pool_tokens=64, page_size=1)
    rid = bench.submit(prompt(40), None, ignore_eos=True)
    bench.run()
    assert len(bench.answers[rid]) == 24
    bench.assert_right()
    bench.assert_clean()


def test_a_stop_token_is_found_one_step_late() -> None:
    """It is told at once; what the step in flight gives is ignored; then the pages are free."""
    bench = Bench(overlap=True)
    answer = hash_answer(prompt(7), 40, frozenset())
    rid = bench.submit(prompt(7), 40, ignore_eos=True, stop_token_ids=(answer[1],))
    for _ in range(2):
        bench.launch()
    bench.land()
    assert bench.launch()
    bench.land()
    assert bench.finishes[rid].matched == answer[1]
    assert states(bench) == {rid: ReqState.ENDING}
    assert bench.scheduler.stats().used_tokens > 0
    assert not bench.scheduler.idle
    assert not bench.launch(), "nothing is left to compute"
    bench.land()
    assert bench.answers[rid] == answer[: answer.index(answer[1]) + 1]
    bench.assert_clean()


@pytest.mark.parametrize("end", [AbortReq(1), StopMatched(1)])
def test_an_end_with_two_steps_in_flight(end: AbortReq | StopMatched) -> None:
    bench = Bench(overlap=True)
    rid, other = decoding(bench, 7, 9)
    for _ in range(2):
        bench.launch()
    told = list(bench.answers[rid])
    bench.send(end)
    bench.send(end)
    assert bench.finishes[rid].reason == ("abort" if isinstance(end, AbortReq) else "stop")
    used = bench.scheduler.stats().used_tokens
    bench.land()
    assert states(bench)[rid] is ReqState.ENDING, "the second step still writes its pages"
    assert bench.scheduler.stats().used_tokens == used
    assert bench.launch()
    assert len(rows_in_flight(bench)[1]) == 1, "it takes part no more"
    bench.land()
    assert set(states(bench)) == {other}
    assert bench.scheduler.stats().used_tokens < used
    assert bench.answers[rid] == told
    bench.run()
    bench.assert_right(other)
    bench.assert_clean()


def test_ends_of_a_prompt_that_is_being_cut() -> None:
    """It is not gone on with, and what others may use of it is what its client saw computed."""
    bench = Bench(overlap=True, page_size=16, chunk=32)
    bench.submit(prompt(100), 4)
    bench.launch()
    bench.launch()
    bench.abort(1)
    bench.land()
    assert not bench.launch()
    bench.land()
    bench.assert_clean()
    again = bench.submit(prompt(100), 4)
    bench.run()
    assert bench.cached[again] == 64
    bench.assert_right(again)


def test_a_cut_prompt_goes_on_over_two_launched_steps() -> None:
    bench = Bench(overlap=True, page_size=4, chunk=32)
    rid = bench.submit(prompt(80), 4, ignore_eos=True)
    for _ in range(2):
        bench.launch()
    spans = [(one.batch.prefix_lens, one.batch.extend_lens) for one in bench.in_flight]
    assert spans == [([0], [32]), ([32], [32])]
    bench.land()
    assert bench.scheduler.stats().tree_pages == 32 // 4, "what has landed is there for others"
    bench.run()
    bench.assert_right(rid)
    bench.assert_clean()


def test_those_who_share_a_prompt_wait_for_the_step_that_computes_it() -> None:
    """Also when that step is launched: its pages are in the tree as soon as it has been read."""
    bench = Bench(overlap=True, page_size=4, chunk=128, prefix_group_tokens=16)
    bench.submit(prompt(60), 4)
    bench.launch()
    second = bench.submit([*prompt(60), 1], 4)
    other = bench.submit(prompt(20, 5), 4)
    assert bench.launch()
    assert set(bench.running()) == {1, other}
    bench.land()
    assert bench.launch()
    assert second in bench.running()
    bench.run()
    assert bench.cached[second] == 60
    bench.assert_right()


def test_equal_prompts_in_two_steps_end_up_on_the_same_pages() -> None:
    """Pages of the second are free while a launched step reads them: nothing overtakes that."""
    bench = Bench(overlap=True, page_size=4, chunk=64, prefix_group_tokens=0)
    bench.submit(prompt(40), 30, ignore_eos=True)
    bench.launch()
    bench.submit(prompt(40), 30, ignore_eos=True)
    bench.launch()
    bench.land()
    bench.submit(prompt(30, 2), 20, ignore_eos=True)
    bench.launch()
    bench.land()
    assert bench.scheduler.stats().tree_pages == 10
    bench.submit(prompt(30, 3), 20, ignore_eos=True)
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_nobody_is_retracted_while_a_result_is_outstanding() -> None:
    """It may end who would have to give way: then nobody has to. Else it happens one turn later."""
    bench = Bench(overlap=True, pool_tokens=64, page_size=4, chunk=64, ratio=0.01)
    first, second = decoding(bench, 20, 20, max_new=20)
    while bench.launch():
        if len(bench.in_flight) == 2:
            bench.land()
    assert len(bench.in_flight) == 1
    assert bench.scheduler.totals.retractions == 0
    assert not bench.launch(), "it stays so until the result is there"
    bench.land()
    assert bench.launch()
    assert bench.scheduler.totals.retractions == 1
    bench.run()
    bench.assert_right(first, second)
    bench.assert_clean()


def test_a_result_that_frees_pages_makes_a_retraction_needless() -> None:
    bench = Bench(overlap=True, pool_tokens=64, page_size=4, chunk=64, ratio=0.01)
    first, second = decoding(bench, 20, 20, max_new=20)
    while bench.launch():
        if len(bench.in_flight) == 2:
            bench.land()
    bench.abort(first)
    assert not bench.launch()
    bench.land()
    assert bench.launch()
    bench.run()
    assert bench.scheduler.totals.retractions == 0
    bench.assert_right(second)
    bench.assert_clean()


def test_a_preemption_waits_for_the_results() -> None:
    bench = Bench(overlap=True, max_running=2, schedule_policy="priority", preemption_threshold=1)
    low = decoding(bench, 7, 9)
    bench.launch()
    high = bench.submit(prompt(5, 9), 4, priority=1, ignore_eos=True)
    assert bench.launch(), "those who run go on meanwhile"
    assert bench.running() == set(low)
    bench.land()
    assert not bench.launch()
    bench.land()
    assert bench.launch()
    assert high in bench.running()
    assert bench.scheduler.totals.retractions == 1
    bench.run()
    bench.assert_right()
    bench.assert_clean()


def test_a_broken_row_whose_next_step_is_launched() -> None:
    """Its client is told once; neither step's keys and values are for others to find."""
    bench = Bench(overlap=True, page_size=1)
    rid, other = decoding(bench, 7, 9)
    for _ in range(2):
        bench.launch()
    bench.runner.fail_rows.add(bench.in_flight[0].batch.rows[0])
    bench.land()
    assert bench.finishes[rid].status == 500
    assert states(bench)[rid] is ReqState.ENDING
    bench.land()
    assert rid not in states(bench)
    bench.run()
    again = bench.submit(prompt(7) + bench.answers[rid] + [3], 5)
    bench.run()
    assert bench.cached[again] == 7
    bench.assert_right(other, again)
    bench.assert_clean()


def test_a_row_that_breaks_after_its_end_leaves_nothing_behind() -> None:
    bench = Bench(overlap=True, page_size=1)
    (rid,) = decoding(bench, 7)
    bench.launch()
    bench.launch()
    bench.abort(rid)
    bench.land()
    bench.runner.fail_rows.add(bench.in_flight[0].batch.rows[0])
    bench.land()
    assert bench.finishes[rid].reason == "abort"
    again = bench.submit(prompt(7) + bench.answers[rid] + [3], 5)
    bench.run()
    assert bench.cached[again] == 7
    bench.assert_right(again)


def test_a_slot_is_not_written_while_a_launched_step_reads_it() -> None:
    bench = Bench(overlap=True, max_loras=1)
    bench.load(1)
    bench.load(2)
    first = bench.submit(prompt(5), 40, lora_id=1, ignore_eos=True)
    bench.launch()
    bench.launch()
    second = bench.submit(prompt(5), 4, lora_id=2, ignore_eos=True)
    bench.abort(first)
    bench.land()
    assert not bench.launch()
    bench.land()
    assert bench.launch()
    assert bench.in_flight[0].batch.new_loras == [(1, 2)]
    bench.run()
    bench.assert_right(second)
    bench.assert_clean()


def test_an_adapter_is_dropped_when_its_last_step_has_landed() -> None:
    bench = Bench(overlap=True)
    bench.load(1)
    rid = bench.submit(prompt(5), 40, lora_id=1, ignore_eos=True)
    bench.launch()
    bench.launch()
    bench.abort(rid)
    bench.land()
    assert bench.runner.loras.present == {1}
    assert len(bench.scheduler._loras.adapters()) == 1
    bench.land()
    bench.assert_clean()


def test_a_flush_and_a_drain_wait_for_the_last_step() -> None:
    """SCH-20."""
    bench = Bench(overlap=True)
    rid = bench.submit(prompt(20), 40, ignore_eos=True)
    bench.launch()
    bench.launch()
    bench.send(FlushReq(1, timeout_s=0.0))
    bench.send(FlushReq(2, timeout_s=9.0))
    bench.send(DrainReq())
    bench.abort(rid)
    bench.land()
    assert [answer.seq for answer in bench.flushed] == [1]
    assert not bench.drained
    bench.land()
    assert [(answer.seq, answer.ok) for answer in bench.flushed] == [(1, False), (2, True)]
    assert bench.drained


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_forced_retractions_come_as_often(every: int) -> None:
    """A fault that falls on a step in flight is not lost."""
    bench = Bench(overlap=True, pool_tokens=512, faults=Faults(retract_every=every))
    for seed in range(6):
        bench.submit(prompt(20 + seed * 7, seed % 3), 30, ignore_eos=True)
    bench.run()
    retractions = bench.scheduler.totals.retractions
    assert retractions == 12 if every < 3 else 3 < retractions <= 12
    bench.assert_right()
    bench.assert_clean()


@pytest.mark.parametrize("every", [1, 2, 5, 11])
def test_allocations_that_fail_while_a_step_is_in_flight(every: int) -> None:
    """Who has missed a step tries again; after the third time its end is told, once."""
    bench = Bench(overlap=True, pool_tokens=1024, faults=Faults(fail_allocation_every=every))
    for seed in range(6):
        bench.submit(prompt(20 + seed * 7, seed % 3), 30, ignore_eos=True)
    bench.run()
    assert set(bench.finishes) == set(bench.requests)
    assert bench.scheduler.totals.violations == bench.faults.allocations // every
    bench.assert_right()
    bench.assert_clean()
