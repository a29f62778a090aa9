"""Driving a server: loops, chats, errors by kind, and what stops when."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence

import pytest
from support.fake_openai import CACHED, FakeOpenAI

from tokenloom.bench.http_stream import HttpClient
from tokenloom.bench.load import Driver, LagProbe, Run, run_workload
from tokenloom.bench.summary import OK, STOPPED, Record, summarise
from tokenloom.bench.targets import Dialect, HttpTarget, Reply, RequestFailed, first_model
from tokenloom.bench.workloads import (
    Closed,
    Open,
    Session,
    Shape,
    Source,
    Stream,
    Workload,
    chats,
    even,
    independent,
    long_prompts,
)


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


def requests(count: int) -> tuple[Session, ...]:
    return independent(Source(1), count, Shape(6, 4))


def load(server: FakeOpenAI, workload: Workload, model: str = "fine", timeout: float = 30) -> Run:
    async def run() -> Run:
        target = HttpTarget(HttpClient(server.base_url), model)
        try:
            return await run_workload(workload, Driver(target, timeout))
        finally:
            await target.aclose()

    return asyncio.run(run())


def test_closed_loop_keeps_so_many_in_flight(server: FakeOpenAI) -> None:
    barrier = Barrier(3)
    server.step = barrier.wait
    run = load(server, (Stream("r", requests(9), Closed(3)),))
    assert server.most == 3
    assert barrier.full == 9 / 3 * 4, "three at a time, each with four tokens"
    assert [record.outcome for record in run.records] == [OK] * 9


class Barrier:
    """Lets tokens out three at a time, so that a run with fewer in flight would never end."""

    def __init__(self, parties: int) -> None:
        self.full = 0
        self._parties = parties
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        self._waiting.append(asyncio.get_running_loop().create_future())
        mine = self._waiting[-1]
        if len(self._waiting) == self._parties:
            self.full += 1
            for one in self._waiting:
                one.set_result(None)
            self._waiting = []
        await mine


def test_open_loop_sends_on_time_whatever_becomes_of_the_others(server: FakeOpenAI) -> None:
    everybody = asyncio.Event()

    async def until_all_are_here() -> None:
        if len(server.asked) == 4:
            everybody.set()
        await everybody.wait()

    server.step = until_all_are_here
    times = (0.0, 0.0, 0.02, 0.03)
    run = load(server, (Stream("r", requests(4), Open(times)),))
    assert everybody.is_set()
    assert server.most == 4
    starts = sorted(record.due or 0.0 for record in run.records)
    assert [due - starts[0] for due in starts] == pytest.approx(times, abs=1e-9)
    assert all(record.due is not None and record.sent >= record.due for record in run.records)
    assert summarise(run.records).late_ms.count == 4


def test_records_have_the_servers_counts_and_times_in_order(server: FakeOpenAI) -> None:
    run = load(server, (Stream("r", requests(3), Closed(1)),))
    assert [body["prompt"] for body in server.asked] == [list(s[0].tokens) for s in requests(3)]
    assert {body["max_tokens"] for body in server.asked} == {4}
    assert server.asked[0]["ignore_eos"] is True
    assert server.asked[0]["temperature"] == 0
    for record in run.records:
        assert (record.prompt_tokens, record.completion_tokens) == (6, 4)
        assert record.cached_tokens == CACHED
        times = [record.sent, *record.text_times, record.ended]
        assert len(times) == 2 + 4
        assert times == sorted(times)
    assert all(a.ended <= b.sent for a, b in itertools.pairwise(run.records))


def test_a_server_without_usage_counts_by_pieces(server: FakeOpenAI) -> None:
    (record,) = load(server, (Stream("r", requests(1), Closed(1)),), "silent").records
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == (OK, 6, 4)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("refuses", "HTTP 503"),
        ("cuts", "disconnected"),
        ("ends-early", "cut short"),
        ("fails", "error in stream"),
        ("garbles", "unreadable answer"),
        ("hangs", "timeout"),
    ],
)
def test_errors_are_counted_by_kind_and_the_run_goes_on(
    server: FakeOpenAI, model: str, kind: str
) -> None:
    run = load(server, (Stream("r", requests(3), Closed(2)),), model, timeout=0.2)
    assert summarise(run.records).errors == {kind: 3}
    assert kind == "timeout" or run.messages[kind]


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    gone = FakeOpenAI(port=9)
    run = load(gone, (Stream("r", requests(2), Closed(1)),))
    assert summarise(run.records).errors == {"no connection": 2}


def test_a_short_answer_is_no_error_but_told(server: FakeOpenAI) -> None:
    summary = summarise(load(server, (Stream("r", requests(2), Closed(1)),), "short").records)
    assert (summary.ok, summary.short_answers) == (2, 2)


class Echo:
    """A target without a server: remembers prompts, answers with fixed ids or text."""

    def __init__(self, reply: Reply, fail_at: int = -1) -> None:
        self.prompts: list[list[int]] = []
        self._reply = reply
        self._fail_at = fail_at

    async def ask(self, prompt: Sequence[int], record: Record) -> Reply:
        self.prompts.append(list(prompt))
        if len(self.prompts) - 1 == self._fail_at:
            raise RequestFailed("odd")
        return self._reply

    async def aclose(self) -> None:
        pass


CHAT = chats(Source(1), 1, Shape(3, 2), turns=3)


def talk(target: Echo, encode: bool = False) -> Run:
    driver = Driver(target, 5.0, (lambda text: [len(text)]) if encode else None)
    return asyncio.run(run_workload((Stream("t", CHAT, Closed(1)),), driver))


@pytest.mark.parametrize(
    ("reply", "encode", "answers"),
    [
        (Reply("abc", [8, 9]), True, [(8, 9)] * 2),  # ids are better than text
        (Reply("abc", None), True, [(3,)] * 2),
        (Reply("abc", None), False, [CHAT[0][0].stand_in, CHAT[0][1].stand_in]),
    ],
)
def test_a_chat_says_again_what_was_said(
    reply: Reply, encode: bool, answers: list[tuple[int, ...]]
) -> None:
    target = Echo(reply)
    talk(target, encode)
    first, second, third = (list(turn.tokens) for turn in CHAT[0])
    assert target.prompts[1] == first + list(answers[0]) + second
    assert target.prompts[2] == target.prompts[1] + list(answers[1]) + third


def test_a_broken_chat_ends() -> None:
    target = Echo(Reply("", None), fail_at=1)
    assert [record.outcome for record in talk(target).records] == [OK, "odd"]


def test_the_background_is_stopped_after_the_last_of_the_rest(server: FakeOpenAI) -> None:
    server.step = lambda: asyncio.sleep(0)
    decode = Stream("decode", independent(Source(1), 2, Shape(6, 1 << 30)), Closed(2))
    run = load(server, long_prompts(Source(1), decode, even(0.02, 3), Shape(50, 2)))
    outcomes = {(record.label, record.outcome) for record in run.records}
    assert outcomes == {("decode", STOPPED), ("long", OK)}
    assert len(run.records) == 2 + 3
    assert sum(len(record.text_times) for record in run.records if record.label == "decode") > 2


def test_prompts_go_as_text_where_ids_are_not_taken(server: FakeOpenAI) -> None:
    async def run() -> Run:
        dialect = Dialect({"greedy": 1}, decode=lambda ids: " ".join(map(str, ids)))
        target = HttpTarget(HttpClient(server.base_url), "fine", dialect)
        work = run_workload((Stream("r", requests(1), Closed(1)),), Driver(target, 5.0))
        try:
            return await work
        finally:
            await target.aclose()

    (record,) = asyncio.run(run()).records
    assert server.asked[0]["prompt"] == " ".join(map(str, requests(1)[0][0].tokens))
    assert server.asked[0]["greedy"] == 1
    assert "ignore_eos" not in server.asked[0]
    assert record.prompt_tokens == 6


def test_the_first_model_of_a_server(server: FakeOpenAI) -> None:
    async def ask() -> str:
        client = HttpClient(server.base_url)
        try:
            return await first_model(client)
        finally:
            client.close()

    assert asyncio.run(ask()) == "fine"
    server.models = ()
    with pytest.raises(ValueError, match="lists no model"):
        asyncio.run(ask())


def test_the_harness_measures_itself(server: FakeOpenAI) -> None:
    run = load(server, (Stream("r", requests(2), Closed(1)),))
    assert run.lag
    assert min(run.lag) > 0.0
    assert run.cpu_share > 0.0


async def sampled(probe: LagProbe) -> None:
    async with asyncio.timeout(10):
        while not probe.seen:  # noqa: ASYNC110  (the probe tells nobody)
            await asyncio.sleep(0)


def test_a_blocked_loop_is_seen_as_lag() -> None:
    async def block() -> list[float]:
        with LagProbe() as probe:
            await sampled(probe)
            del probe.seen[:]
            threading.Event().wait(0.1)
            await sampled(probe)
            return probe.seen

    assert max(asyncio.run(block())) > 0.05
