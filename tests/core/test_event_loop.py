"""The scheduler process's loop over scripted messages, and the lines that it logs."""

import gc
import logging
import re
import weakref
from dataclasses import dataclass

import pytest
from support.hash_model import HashAdapters, LateResult
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.event_loop import IDLE_CHECK_MS, STALLED_MS, event_loop
from tokenloom.scheduler_proc.worker_batch import BatchResult, ModelWorkerBatch
from tokenloom.wire.kv_events import AllBlocksCleared, BlockStored, KVEvent
from tokenloom.wire.messages import (
    AbortReq,
    BatchTokenIDOut,
    Drained,
    DrainReq,
    FlushOut,
    FlushReq,
    StatsOut,
    StatsReq,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
)
from tokenloom.wire.sampling import SamplingParams


class Script:
    """A mailbox: what it yields at each call, and how long the loop was ready to wait."""

    def __init__(self, *calls: list[ToScheduler]) -> None:
        self.calls = list(calls)
        self.waits: list[int | None] = []

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        self.waits.append(timeout_ms)
        if self.calls:
            return self.calls.pop(0)
        assert timeout_ms in (0, STALLED_MS), "the script is over and the loop would sleep"
        return []


class Sent(list[ToDetokenizer]):
    def send(self, message: ToDetokenizer) -> None:
        self.append(message)


def request(rid: int, max_new: int = 50) -> TokenizedGenerateReq:
    params = SamplingParams(max_new_tokens=max_new, seed=0, ignore_eos=True)
    return TokenizedGenerateReq(rid, b"\5\0\0\0\6\0\0\0", params)


def test_serves_sleeps_when_idle_and_drains() -> None:
    bench = Bench()
    script = Script([], [request(1)], [StatsReq(4)], [DrainReq()])
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, script, sent)
    assert script.waits[:3] == [1000, None, 0], "idle: first a pause for the audit, then asleep"
    tokens = [
        token
        for message in sent
        if isinstance(message, BatchTokenIDOut)
        for row in message.rows
        for token in row.token_ids
    ]
    assert len(tokens) == 50, "a drain lets running requests end"
    assert any(isinstance(message, StatsOut) and message.seq == 4 for message in sent)
    assert isinstance(sent[-1], Drained)


class Watched:
    """A runner that writes down what the loop does, and how often it has looked for messages."""

    def __init__(self, bench: Bench, script: Script) -> None:
        self.loras = bench.runner.loras
        self.did: list[tuple[str, int]] = []
        self.looks: list[int] = []
        self.to_prepare = 0
        self._runner = bench.runner
        self._script = script

    def prepare(self) -> bool:
        self.to_prepare -= 1
        return self.to_prepare >= 0

    def launch(self, batch: ModelWorkerBatch) -> "WatchedStep":
        self.did.append(("launch", batch.step))
        self.looks.append(len(self._script.waits))
        return WatchedStep(self, self._runner.launch(batch))


@dataclass
class WatchedStep:
    runner: Watched
    launched: LateResult
    how: str = "eager: graphs are off"

    def result(self) -> BatchResult:
        result = self.launched.result()
        self.runner.did.append(("read", result.step))
        return result


def test_idle_moments_are_used_until_something_comes() -> None:
    """What the runner prepares is never ahead of a message, and the loop sleeps only after it."""
    bench, script = Bench(), Script([], [], [], [request(1, 2)], [], [], [], [], [DrainReq()])
    runner = Watched(bench, script)
    runner.to_prepare = 5
    event_loop(bench.scheduler, runner, script, Sent())
    assert script.waits[:4] == [0, 0, 0, 0]  # looked for messages after each of three, and met one
    assert runner.did[0] == ("launch", 1)
    assert runner.to_prepare < 0
    assert script.waits[-1] == IDLE_CHECK_MS


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_launched_before_or_after_the_result_of_the_last_one(overlap: bool) -> None:
    bench = Bench()
    script = Script([request(1, 4)], [DrainReq()])
    runner, sent = Watched(bench, script), Sent()
    event_loop(bench.scheduler, runner, script, sent, overlap=overlap)
    in_turn = [(what, step) for step in range(1, 5) for what in ("launch", "read")]
    ahead = [("launch", 1)]
    for step in range(2, 5):
        ahead += [("launch", step), ("read", step - 1)]
    assert runner.did == ([*ahead, ("read", 4)] if overlap else in_turn)
    assert finishes(sent) == {1: (200, 4)}
    assert set(script.waits[:-1]) <= {1000, 0}, "no nap while a step is in flight"
    assert runner.looks == list(range(1, 5)), "and no turn without something to do"


def test_messages_are_read_while_a_step_is_in_flight() -> None:
    """Its client is told before the step has been read; the loop does not sleep until it has."""
    bench = Bench()
    script = Script([request(1)], [], [AbortReq(1)], [], [DrainReq()])
    runner, sent = Watched(bench, script), Sent()
    event_loop(bench.scheduler, runner, script, sent, overlap=True)
    assert finishes(sent) == {1: (200, 1)}
    assert runner.did == [("launch", 1), ("launch", 2), ("read", 1), ("read", 2)]
    assert script.waits == [1000, 0, 0, 1000, None], "asleep once the second step has been read"
    bench.assert_clean()


class UntilAllEnd(Script):
    def __init__(self, sent: Sent, *calls: list[ToScheduler]) -> None:
        super().__init__(*calls)
        self._sent, self._asked = sent, len(calls)

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        if len(finishes(self._sent)) == self._asked:
            return [DrainReq()]
        return super().receive(timeout_ms)


def test_answers_are_the_same_either_way() -> None:
    answers = []
    for overlap in (False, True):
        bench = Bench(pool_tokens=128, ratio=0.01)
        sent = Sent()
        script = UntilAllEnd(sent, *[[request(rid, 60)] for rid in range(1, 6)])
        event_loop(bench.scheduler, bench.runner, script, sent, overlap=overlap)
        assert bench.scheduler.totals.retractions
        answers.append(tokens_of(sent))
        bench.assert_clean()
    assert answers[0] == answers[1]
    assert {len(answer) for answer in answers[0].values()} == {60}


def tokens_of(sent: Sent) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for message in sent:
        for row in message.rows if isinstance(message, BatchTokenIDOut) else ():
            tokens.setdefault(row.rid, []).extend(row.token_ids)
    return tokens


class Published(list[KVEvent]):
    def publish(self, events: list[KVEvent]) -> None:
        self.extend(events)


def test_cache_events_are_published_by_the_time_the_loop_sleeps() -> None:
    bench = Bench(events=True)
    published = Published()
    script = Script([request(1, 3)], [], [], [FlushReq(1)], [DrainReq()])
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, script, sent, published)
    stored, cleared = published
    assert isinstance(stored, BlockStored)
    assert stored.token_ids[:2] == [5, 6]
    assert isinstance(cleared, AllBlocksCleared)
    assert FlushOut(1, True, pages=1) in sent


def test_garbage_is_collected_when_idle() -> None:
    """While it serves, the loop's process makes no full collections."""

    class Knot:
        itself: "Knot"

    knot = Knot()
    knot.itself = knot
    alive = weakref.ref(knot)
    del knot
    bench = Bench()
    gc.disable()
    try:
        event_loop(bench.scheduler, bench.runner, Script([], [DrainReq()]), Sent())
        assert alive() is None
        assert gc.get_freeze_count(), "what is alive is not looked at again"
    finally:
        gc.unfreeze()
        gc.enable()


def test_messages_are_read_between_the_slices_of_an_idle_audit() -> None:
    """It goes on without another pause after one that needs no step."""
    bench = Bench(pool_tokens=512, page_size=4)
    bench.scheduler.audit.size = 8
    slices = 512 // 4 // 8
    calls: list[list[ToScheduler]] = [[] for _ in range(slices + 2)]
    calls[5] = [StatsReq(7)]
    sent, script = Sent(), Script(*calls, [DrainReq()])
    event_loop(bench.scheduler, bench.runner, script, sent)
    assert any(isinstance(message, StatsOut) for message in sent)
    looks = [0] * (slices + 1)  # one after each, and one when it is idle again
    assert script.waits == [IDLE_CHECK_MS, *looks, None]


def test_the_loop_tells_the_time() -> None:
    """A flush that may wait for an hour is not refused at once, one that may not is."""
    bench = Bench()
    flushes: list[ToScheduler] = [FlushReq(1, 3600.0), FlushReq(2, 0.0), FlushReq(3, 1e-9)]
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, Script([request(1)], flushes, [DrainReq()]), sent)
    answers = [message for message in sent if isinstance(message, FlushOut)]
    assert [(answer.seq, answer.ok) for answer in answers] == [(2, False), (3, False), (1, True)]


def test_a_broken_law_is_logged_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.scheduler._kv.pages.alloc(1)
    event_loop(bench.scheduler, bench.runner, Script([], [DrainReq()]), Sent())
    assert "lost pages" in caplog.text


def test_the_lines_that_users_tune_by(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(pool_tokens=512)
    event_loop(bench.scheduler, bench.runner, Script([request(1, 60), DrainReq()]), Sent())
    prefills = [line for line in caplog.messages if line.startswith("Prefill batch")]
    decodes = [line for line in caplog.messages if line.startswith("Decode batch")]
    assert len(prefills) == 0, "a drain refuses what has not started"
    assert len(decodes) == 0
    bench = Bench(pool_tokens=512)
    event_loop(bench.scheduler, bench.runner, Script([request(1, 60)], [DrainReq()]), Sent())
    (prefill,) = [line for line in caplog.messages if line.startswith("Prefill batch")]
    (decode,) = [line for line in caplog.messages if line.startswith("Decode batch")]
    assert "#new-seq: 1, #new-token: 2, #cached-token: 0" in prefill
    assert prefill.endswith("hit rate: 0.00, #evicted-page: 0, #tree-node: 0, #tree-page: 0")
    assert re.search(
        r"#token: (\d+), token usage: ([\d.]+), gen throughput \(token/s\): ([\d.]+), "
        r"#queue-req: (\d+),",
        decode,
    )


def test_a_line_says_how_its_step_ran(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench, script = Bench(), Script([request(1)], [DrainReq()])
    event_loop(bench.scheduler, Watched(bench, script), script, Sent())
    (line,) = [line for line in caplog.messages if line.startswith("Decode batch")]
    assert line.endswith("#retracted-req: 0, eager: graphs are off,")
    (line,) = [line for line in caplog.messages if line.startswith("Prefill batch")]
    assert line.endswith("#tree-page: 0, eager: graphs are off")


def finishes(sent: Sent) -> dict[int, tuple[int, int]]:
    """By rid: the status of its end, and how many tokens it had."""
    tokens: dict[int, int] = {}
    ends = {}
    for message in sent:
        for row in message.rows if isinstance(message, BatchTokenIDOut) else ():
            tokens[row.rid] = tokens.get(row.rid, 0) + len(row.token_ids)
            if row.finish is not None:
                ends[row.rid] = (row.finish.status, tokens[row.rid])
    return ends


def test_time_passes_with_each_turn_and_counts_from_when_a_request_was_read() -> None:
    bench = Bench(request_timeout=10.0)
    seconds = iter([*[100.0] * 3, *[104.0] * 3, *[109.0] * 3, 110.0, 111.0, 112.0])
    script = Script([request(1)], [], [], [], [DrainReq()])
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, script, sent, clock=lambda: next(seconds))
    assert finishes(sent) == {1: (408, 3)}, "a step at 100, 104 and 109, none at 110"


def test_time_limits_go_on_while_nothing_can_be_computed() -> None:
    """The loop naps rather than spin, or sleep for ever, until the limit frees the queue."""
    bench = Bench(queue_timeout=10.0)
    rows = bench.scheduler._kv.rows
    rows.alloc(rows.available)
    seconds = iter([0.0, 1.0, 9.0, 10.0, 11.0])
    script = Script([request(1)], [], [], [], [DrainReq()])
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, script, sent, clock=lambda: next(seconds))
    assert finishes(sent) == {1: (503, 0)}
    assert script.waits[1:4] == [STALLED_MS] * 3


def test_what_ends_without_a_step_is_said_before_the_loop_sleeps() -> None:
    bench = Bench(faults=Faults(fail_allocation_every=1))
    script = Script([request(1)], [], [], [], [DrainReq()])
    sent = Sent()
    event_loop(bench.scheduler, bench.runner, script, sent)
    assert finishes(sent) == {1: (500, 0)}
    assert script.waits == [1000, STALLED_MS, STALLED_MS, STALLED_MS, 1000]


@dataclass
class Timed:
    """A clock that moves as the script of a test says: by what launches and results take."""

    bench: Bench
    launch_s: float
    result_s: float
    now: float = 50.0

    @property
    def loras(self) -> HashAdapters:
        return self.bench.runner.loras

    def prepare(self) -> bool:
        return False

    def launch(self, batch: ModelWorkerBatch) -> "TimedStep":
        self.now += self.launch_s
        return TimedStep(self, self.bench.runner.launch(batch))


@dataclass
class TimedStep:
    runner: Timed
    launched: LateResult
    how: str = ""

    def result(self) -> BatchResult:
        self.runner.now += self.runner.result_s
        return self.launched.result()


class Pausing(Script):
    """A mailbox in which each message comes after an hour without work."""

    def __init__(self, timed: Timed, *calls: list[ToScheduler]) -> None:
        super().__init__(*calls)
        self._timed = timed

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        self._timed.now += 3600.0 if timeout_ms is None else 0.0
        return super().receive(timeout_ms)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (False, [5.0] * 6),  # from launch to result
        # launched behind another: from its result, less the launch of the next one in between
        (True, [6.0, 5.0, 4.0] * 2),
    ],
)
def test_a_step_is_measured_while_it_runs_and_not_while_the_loop_sleeps(
    overlap: bool, expected: list[float]
) -> None:
    bench = Bench()
    timed, measured = Timed(bench, launch_s=1.0, result_s=4.0), list[float | None]()
    inner = bench.scheduler.process_batch_result

    def noted(result: BatchResult, seconds: float | None = None) -> list[ToDetokenizer]:
        measured.append(seconds)
        return inner(result, seconds)

    bench.scheduler.process_batch_result = noted  # type: ignore[method-assign]
    script = Pausing(
        timed, [], [request(1, 3)], *[[]] * (6 if overlap else 4), [request(2, 3)], [DrainReq()]
    )
    event_loop(bench.scheduler, timed, script, Sent(), clock=lambda: timed.now, overlap=overlap)
    assert measured == expected
