"""A scheduler, its hash model and its clients' view: applies events and checks laws on the way.

An event is a small list that JSON can carry, and any subset of a history is a history: what makes
no sense at its moment (a result without a step) does nothing. `clients` makes histories up, `run`
replays and shrinks them. The numbers of laws, I1 to I25, are explained in docs/testing.md.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.adapters import Adapters
from sim.laws import check_all
from sim.situations import PROTECTED_AFTER, Situations, watch
from sim.waits import Waits

from tokenloom.bench.simulation.driver import Driver, request
from tokenloom.bench.simulation.hash_model import EOS, VOCAB, HashRunner, Reader, Script
from tokenloom.bench.simulation.step_time import StepTime
from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.core.intake import Limits
from tokenloom.scheduler_proc.core.lora_slots import PATIENCE
from tokenloom.scheduler_proc.core.req import ReqState
from tokenloom.scheduler_proc.core.scheduler import MAX_LAUNCHED, Scheduler
from tokenloom.wire.messages import (
    AbortReq,
    BatchTokenIDOut,
    Drained,
    DrainReq,
    Finish,
    FlushOut,
    FlushReq,
    LoRALoaded,
    LoRAUnloaded,
    StatsOut,
    StatsReq,
    StopMatched,
    ToDetokenizer,
    TokenIDOut,
    TokenizedGenerateReq,
    ToScheduler,
)
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

Event = list[Any]
Setup = dict[str, Any]
FULL_CHECK_EVERY = 64  # steps
AUDIT_SLICE = 16  # pages and nodes: pools are small here
_CONSTANT_TIME = StepTime(step=1.0, row=0.0, token=0.0, context_token=0.0)
_GROWING = ("step", "retractions_total", "prompt_tokens_total", "cached_tokens_total")


def _faults(every: dict[str, int] | None) -> dict[str, Any]:
    """What the tests make go wrong, as an argument of the Scheduler."""
    if not every:
        return {}
    return {"faults": Faults(**every)}


def tokens_of(stream: int, start: int, count: int) -> list[int]:
    """A piece of one of infinitely many endless texts."""
    return [(stream * 7919 + i * i * 31 + i * (stream + 3)) % (VOCAB - 1) + 1
            for i in range(start, start + count)]  # fmt: skip


@dataclass(slots=True, eq=False)
class Client:
    """What one client asked for and what it has been told."""

    message: TokenizedGenerateReq
    prompt: list[int]
    limit: int  # tokens of answer at most; below 1: must be refused
    stop_ids: frozenset[int]
    alone: Reader  # the same request with a pool of its own
    got: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cached: int | None = None
    may_abort: bool = False
    may_stop: bool = False
    may_break: bool = False
    after_drain: bool = False
    too_many: bool = False  # others were waiting when it came
    displaced: bool = False  # by one of higher priority
    no_adapter: bool = False


class World:
    def __init__(self, setup: Setup, situations: Situations) -> None:
        self.setup = setup
        settings = SchedulingConfig(**setup["scheduling"])
        self.page_size = settings.page_size
        self.num_rows = settings.max_running_requests
        self.capacity = setup["pool_pages"] * self.page_size
        num_pages = setup["pool_pages"] + 1
        self.longest = min(setup["context"], self.capacity)
        slots = setup.get("lora_slots", 1)
        limits = Limits(VOCAB, setup["context"], self.capacity, frozenset({EOS}), slots)
        self.settings = settings
        self.faults = setup.get("faults")
        self.scheduler = Scheduler(settings, limits, num_pages, **_faults(self.faults))
        if not setup["learns"]:  # one retraction teaches a pool of this size to have no more
            ratio = self.scheduler._admission.ratio
            ratio.learn = lambda survivors: None  # type: ignore[method-assign]
        self.scheduler.audit.size = AUDIT_SLICE
        self.scheduler._loras.patience = setup.get("patience", PATIENCE)
        chunk, most = settings.chunked_prefill_size, settings.max_prefill_tokens
        self.budget = max(
            self.page_size, min(chunk, most) if chunk else max(most, setup["context"])
        )
        runner = HashRunner(
            num_pages=num_pages,
            page_size=self.page_size,
            num_rows=self.num_rows,
            budget=self.budget,
        )
        self.driver = Driver(self.scheduler, runner, _CONSTANT_TIME)
        self._most_in_flight = MAX_LAUNCHED if setup.get("overlap") else 1
        self._nothing_planned = False  # by the last launch
        self.clients: dict[int, Client] = {}
        self.live: dict[int, Client] = {}
        self.situations = situations
        self.adapters = Adapters(self.driver, situations, self._deliver)
        self.trace = 0  # a hash of all that was decided and said
        self.draining = False
        self._drain_ends = math.inf
        self.drained = False
        self._flushes = 0  # asked for and not answered
        self.violations = 0  # that the scheduler must have counted
        self._last_stats = self.scheduler.stats()
        watch(self.scheduler, situations.count)
        Waits(self.scheduler, situations.count, faults=bool(self.faults))

    # -- events

    def apply(self, event: Event) -> None:
        getattr(self, f"_on_{event[0]}")(*event[1:])

    def _on_submit(self, rid: int, text: dict[str, Any], wishes: dict[str, Any]) -> None:
        if rid in self.clients:
            return
        prompt: list[int] = []
        if (before := self.clients.get(text.get("after", 0))) is not None:
            prompt += before.prompt + before.got
        prompt += tokens_of(text["prefix"], 0, text["shared"])
        prompt += tokens_of(rid + 1000, 0, text["own"])
        more = {
            name: wishes[name]
            for name in ("priority", "tenant", "namespace", "lora_id")
            if name in wishes
        }
        params = SamplingParams(
            max_new_tokens=wishes.get("max_new"),
            ignore_eos=wishes.get("ignore_eos", False),
            stop_token_ids=tuple(wishes.get("stop_ids", ())),
        )
        message = request(rid, prompt, params, **more)
        salt = zlib.crc32(message.namespace.encode())
        room = self.longest - len(prompt) if prompt else 0
        asked = params.max_new_tokens
        limit = room if asked is None else min(room, asked)
        self.driver.runner.scripts[rid] = Script(salt, lora_id=message.lora_id)
        own = frozenset(params.stop_token_ids)
        stops = own if params.ignore_eos else own | {EOS}
        client = Client(message, prompt, limit, stops, Reader(prompt, salt, message.lora_id))
        client.after_drain = self.draining
        client.no_adapter = not self.adapters.serves(message.lora_id)
        servable = limit >= 1 and not self.draining and not client.no_adapter
        displaced: list[Client] = []
        if servable:
            displaced, client.too_many = self._places_for(client)
        for other in displaced:
            other.displaced = True
        self.clients[rid] = self.live[rid] = client
        self._deliver(message)
        refused = not servable or client.too_many
        assert (client.finish is not None) == refused, f"I17: {rid} accepted or refused wrongly"
        assert all(other.finish for other in displaced), f"I17: {rid} displaced too few"

    def _places_for(self, client: Client) -> tuple[list[Client], bool]:
        """Who must leave the queue for it, by its caps; or whether too many wait.

        Retracted requests do not count.
        """
        waiting = [
            other for rid, other in self.live.items() if not self.driver.courses[rid].admissions
        ]
        sign = -1 if self.settings.low_priority_first else 1
        mine = sign * client.message.priority
        lesser = [other for other in waiting if sign * other.message.priority < mine]
        lesser.sort(key=lambda other: -sign * other.message.priority)  # the latest are at the end
        for count in range(len(lesser) + 1):
            gone = lesser[len(lesser) - count :]
            if self._may_wait(client, [other for other in waiting if other not in gone]):
                vain = count and len(client.prompt) > (self.settings.max_waiting_tokens or math.inf)
                beyond = not lesser and self._beyond_its_share(client, waiting)
                return ([], True) if vain or beyond else (gone, False)
        return [], True

    def _beyond_its_share(self, client: Client, waiting: list[Client]) -> bool:
        """It holds eight times what is left; who holds nothing never does."""
        own = [other for other in waiting if other.message.tenant == client.message.tenant]
        if not own:
            return False
        most, tokens = self.settings.max_waiting_requests, self.settings.max_waiting_tokens
        places = most is not None and len(own) >= 8 * (most - len(waiting))
        mine, all_of = (sum(len(other.prompt) for other in group) for group in (own, waiting))
        beyond = places or (tokens is not None and mine >= 8 * (tokens - all_of))
        if beyond:
            self.situations.count("refused: beyond its share")
        return beyond

    def _may_wait(self, client: Client, waiting: list[Client]) -> bool:
        most, tokens = self.settings.max_waiting_requests, self.settings.max_waiting_tokens
        if most is not None and len(waiting) >= most:
            return False
        sum_of = sum(len(other.prompt) for other in waiting) + len(client.prompt)
        return tokens is None or not waiting or sum_of <= tokens

    def _on_time(self, seconds: float) -> None:
        self._hear(self.driver.pass_time(seconds))
        self._check_deadlines()

    def _on_flush(self, timeout_s: float) -> None:
        self._flushes += 1
        self._deliver(FlushReq(self._flushes, timeout_s))

    def _on_load(self, lora_id: int, name: str, fails: bool) -> None:
        self.violations += self.adapters.load(lora_id, name, fails)

    def _on_unload(self, lora_id: int) -> None:
        self.violations += self.adapters.unload(lora_id)

    def _on_loaded(self, most: int) -> None:
        self.adapters.end_loads(most, self._hear)

    def _on_again(self, rid: int) -> None:
        """The same rid while it is in use: a bug of the front, which must harm nobody."""
        if rid in self.live:
            self.violations += 1
            self._deliver(self.clients[rid].message)
            self.situations.count("rid in use sent again")

    def _on_abort(self, rid: int) -> None:
        self._end("abort", rid, AbortReq(rid))

    def _on_stop(self, rid: int) -> None:
        self._end("stop", rid, StopMatched(rid))

    def _end(self, kind: str, rid: int, message: ToScheduler) -> None:
        client = self.live.get(rid)
        req = self.scheduler._reqs.get(rid)
        if client is None and req is not None:
            self.situations.count(f"{kind}: again in flight")
        elif client is None:
            self.situations.count(f"{kind}: {'finished' if rid in self.clients else 'unknown'}")
        elif req is None or req.state is ReqState.ENDING:
            self.situations.count(f"{kind}: ended while planning")  # told with what comes next
        else:
            self.situations.ending(kind, self.scheduler, rid)
            client.may_abort = isinstance(message, AbortReq)
            client.may_stop = not client.may_abort
        self._deliver(message)
        assert client is None or client.finish is not None, f"I15: {rid} outlives its end"

    def _on_stats(self) -> None:
        *ends, stats = self.scheduler.handle(StatsReq(7))
        self._hear(ends)  # of who could not be told while a step was planned
        assert isinstance(stats, StatsOut)
        assert stats.seq == 7
        self._check_stats(stats)

    def _on_drain(self, timeout_s: float | None = None) -> None:
        busy = bool(self.driver.in_flight)
        self.situations.count("drain, step in flight" if busy else "drain, between steps")
        if self.adapters.loading:
            self.situations.count("drain, while loading")
        waiting = [req.rid for req in self.scheduler._waiting if not req.admitted]
        self.draining = True
        if timeout_s is not None:
            self._drain_ends = self.driver.now + timeout_s
        for client in self.live.values():
            client.after_drain = client.message.rid in waiting
        self._deliver(DrainReq(timeout_s))
        assert all(self.clients[rid].finish for rid in waiting), "I19: waits through a drain"

    def _on_idle(self) -> None:
        if self.scheduler.idle:
            assert not self.driver.in_flight, "idle with a step in flight"
            self._audit()

    def _on_launch(self) -> None:
        busy = len(self.driver.in_flight)
        if busy == self._most_in_flight:
            return
        before = list(self.live)
        batch = self.driver.launch()
        self._nothing_planned = batch is None
        if batch is None:
            self.situations.nothing_planned(self.scheduler)
            idles = not (busy or self.faults)
            assert not (idles and before), f"I8: work is left but no step is made: {before[:5]}"
            # the loop asks at each turn for what there is to say, and sleeps once the core is idle
            assert not (self.scheduler.idle and self.live), "I5: ended, and nobody was told"
            self._hear(self.driver.pass_time(0.0))
            self.adapters.follow()
            return
        self.trace = zlib.crc32(
            repr((batch.rows, batch.prefix_lens, batch.extend_lens)).encode(), self.trace
        )
        assert 0 < len(batch.rows) <= self.num_rows, "I10: rows"
        for entry in batch.opened:
            rid = entry.sampling.seed
            assert rid is not None
            self._check_admission(rid)
        self.situations.step(self.scheduler, batch)

    def _on_land(self, broken: Sequence[int] = (), measured: float = 1.0) -> None:
        flying = len(self.driver.in_flight)
        if not flying or (flying < self._most_in_flight and not self._nothing_planned):
            return
        batch, _ = self.driver.in_flight[0]
        runner = self.driver.runner
        for row, samples in zip(batch.rows, batch.samples, strict=True):
            opened = {entry.row: entry.sampling.seed for entry in batch.opened}
            rid = opened.get(row, runner.seeds.get(row))
            if samples and rid in broken:
                runner.fail_rows.add(row)
                self.clients[rid].may_break = True
                self.situations.count("broken sample")
        self.adapters.check_step(batch)
        self._hear(self.driver.land(measured))
        self.adapters.follow()
        assert not runner.fail_rows
        self._check_deadlines()
        self.adapters.check()
        self._check_stats(self.scheduler.stats())
        times = self.scheduler._budget.times
        fit = (times.step, times.decode, times.prompt_token)
        assert all(0 <= value < math.inf for value in fit), f"I21: {fit}"
        if self.driver.steps % FULL_CHECK_EVERY == 0:
            check_all(self.driver)

    def in_rare_states(self) -> list[int]:
        """Retracted and waiting, or with a prompt that is partly computed."""
        retracted = [req.rid for req in self.scheduler._waiting if req.retractions]
        chunked = self.scheduler._chunked
        return retracted if chunked is None else [*retracted, chunked.rid]

    # -- what is said

    def _deliver(self, message: ToScheduler) -> None:
        self._hear(self.driver.deliver(message))

    def _hear(self, said: list[ToDetokenizer]) -> None:
        for message in said:
            self.trace = zlib.crc32(repr(message).encode(), self.trace)
            if isinstance(message, Drained):
                assert self.draining, "I19: drained without being asked to"
                assert not self.drained, "I19: drained twice"
                assert not self.live, "I19: drained with work left"
                assert not self.driver.in_flight, "I19: drained with a step in flight"
                assert not self.adapters.loading, "I19: drained with a load left"
                self.drained = True
            elif isinstance(message, LoRALoaded | LoRAUnloaded):
                self.adapters.hear(message)
            elif isinstance(message, FlushOut):
                self._flushes -= 1
                alone = not self.live and not self.scheduler._running
                assert message.ok == alone, "a flush beside requests, or refused alone"
                self.situations.count("flush: done" if message.ok else "flush: refused")
            else:
                assert isinstance(message, BatchTokenIDOut)
                assert message.rows
                for row in message.rows:
                    self._hear_row(row)

    def _hear_row(self, row: TokenIDOut) -> None:
        client = self.clients[row.rid]
        assert client.finish is None, f"I5: {row.rid} goes on after its end"
        assert (row.opened is not None) == (client.cached is None), "opened: first row, no other"
        assert client.cached in (None, row.cached_tokens), "I6: cached_tokens changed"
        client.cached = row.cached_tokens
        assert 0 <= row.cached_tokens <= max(0, len(client.prompt) - 1), "I6: cached_tokens"
        ended = False
        for token_id in row.token_ids:
            assert not ended, f"{row.rid}: a token after the last one"
            assert token_id == client.alone.crc % VOCAB, f"I7: {row.rid}: not what it gets alone"
            client.alone.read(token_id)
            client.got.append(token_id)
            assert len(client.got) <= client.limit, "I6: more tokens than asked for"
            ended = token_id in client.stop_ids or len(client.got) == client.limit
        assert not ended or row.finish is not None, f"I5: {row.rid} did not end at its last token"
        if row.finish is not None:
            self._check_finish(client, row, row.finish)
            self.situations.told(self.scheduler, row.rid, row.finish)
            client.finish = row.finish
            del self.live[row.rid]

    def _check_finish(self, client: Client, row: TokenIDOut, finish: Finish) -> None:
        match finish.reason:
            case "stop" if finish.matched is not None:
                assert row.token_ids[-1:] == (finish.matched,), "I5: matched is not the last token"
                assert finish.matched in client.stop_ids
            case "stop":
                assert client.may_stop, "I5: stop out of nothing"
            case "length":
                assert row.token_ids, "I5: length without a token"
                assert len(client.got) == client.limit, "I5: length too early"
                length = len(client.prompt) + len(client.got)
                if length == self.longest:
                    border = "pool" if length == self.capacity else "context"
                    self.situations.count(f"length: {border}")
            case "abort":
                assert client.may_abort, "I5: abort out of nothing"
            case "error":
                self._check_error(client, finish)

    def _check_error(self, client: Client, finish: Finish) -> None:
        assert finish.message
        match finish.status:
            case 400:
                assert client.limit < 1, "I5: a good request was refused"
                self.situations.count("refused: too long")
            case 404:
                assert client.no_adapter, "I11: refused for an adapter that is there"
                self.situations.count("refused: no such adapter")
            case 500:
                assert client.may_break or self.faults, "I16: broken without a broken sample"
            case 503 if client.after_drain:
                self.situations.count("refused: draining")
            case 503 if self.driver.now >= self._drain_ends:
                self.situations.count("ended: the drain takes too long")
            case 503 if client.displaced:
                assert not self.driver.courses[client.message.rid].admissions
                self.situations.count("refused: displaced")
            case 503 if client.too_many:
                self.situations.count("refused: too many wait")
            case 503:
                assert self._late("queue_timeout", client), "I5: refused for nothing"
                assert not self.driver.courses[client.message.rid].admissions
                self.situations.count("refused: waits too long")
            case 408:
                assert self._late("request_timeout", client), "I5: ended before its time"
                self.situations.count("ended: takes too long")
            case _:
                raise AssertionError(f"I5: status {finish.status}")

    # -- cheap laws, each step

    def _check_admission(self, rid: int) -> None:
        course = self.driver.courses[rid]
        assert rid in self.live, "an ended request was given a row"
        assert not self.draining or len(course.admissions) > 1, "I19: a new start while draining"
        bound = PROTECTED_AFTER + 1
        assert self.faults or course.retractions <= bound, f"I9: {rid} is retracted again and again"
        self.situations.admission(self.scheduler, rid)

    def _check_stats(self, stats: StatsOut) -> None:
        total = stats.free_tokens + stats.used_tokens + stats.evictable_tokens
        assert total == self.capacity, "I1: counts"
        assert min(stats.free_tokens, stats.used_tokens, stats.evictable_tokens) >= 0, "I1"
        assert stats.running + stats.free_rows == self.num_rows, "rows"
        # who ends while a step is launched holds pages a little longer
        ending = sum(req.state is ReqState.ENDING for req in self.scheduler._running.values())
        held = stats.running - ending + stats.waiting  # who ends while planning is told later
        assert held == len(self.live) or (self.faults and held < len(self.live)), "I5: tables"
        for name in _GROWING:
            assert getattr(stats, name) >= getattr(self._last_stats, name), f"I6: {name} fell"
        assert self.faults or stats.violations_total == self.violations, (
            "the scheduler counted a violation"
        )
        self._last_stats = stats

    def _late(self, limit: str, client: Client) -> bool:
        seconds = getattr(self.settings, limit, None)
        arrived = self.driver.courses[client.message.rid].arrived
        return seconds is not None and self.driver.now >= arrived + seconds

    def _check_deadlines(self) -> None:
        over = self.driver.now >= self._drain_ends
        assert not (over and self.live), "I19: a drain outlives its time"
        for rid, client in self.live.items():
            assert not self._late("request_timeout", client), f"{rid} outlives its time"
            waits = not self.driver.courses[rid].admissions
            assert not (waits and self._late("queue_timeout", client)), f"{rid} waits too long"

    # -- the end

    def finish(self) -> None:
        """Let all that is left run to its end; then nothing may be left anywhere (I5, I20)."""
        need = sum(len(client.prompt) + client.limit for client in self.live.values())
        for _ in range(self._most_in_flight * ((PROTECTED_AFTER + 2) * need + 10)):
            self.apply(["launch"])
            if not self.live and not self.driver.in_flight:
                break
            self.apply(["land"])
        assert not self.live, f"I8: {list(self.live)[:5]} never end"
        assert not self.driver.in_flight, "I20: a step is left"
        self.apply(["time", 60.0])
        assert not self._flushes, "a flush was never answered"
        check_all(self.driver)
        self.adapters.finish(self._hear)
        core, kv = self.scheduler, self.scheduler._kv
        tables = (core._reqs, core._running, core._waiting, core._launched)
        assert [len(table) for table in tables] == [0, 0, 0, 0], "I20: a table is not empty"
        assert core._chunked is None, "I20"
        assert self.drained == self.draining, "I19: never drained"
        assert core.stats().used_tokens == 0, "I20"
        assert kv.make_room(kv.pages.capacity), "I20: the pool is not whole after a flush"
        assert not kv.tree.nodes(), "I20: the tree is not empty after a flush"
        self._audit()

    def _audit(self) -> None:
        """To its end, unless a message comes between: then it goes on in the next idle moment."""
        slices, audit = 0, self.scheduler.audit
        while self.scheduler.on_idle(self._report):
            slices += 1
            assert audit.looked_at <= 2 * AUDIT_SLICE, "I22: a slice of the audit is too long"
        if slices > 2:
            self.situations.count("audit: in slices")

    @staticmethod
    def _report(message: str) -> None:
        raise AssertionError(message)
