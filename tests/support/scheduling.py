"""Bench: a scheduler with its hash model and its clients' view; each step checks invariants."""

from array import array
from collections import deque
from collections.abc import Sequence

from support.hash_model import EOS, VOCAB, HashRunner, LateResult, Script, hash_answer

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.scheduler_proc.core.intake import Limits
from tokenloom.scheduler_proc.core.req import Req
from tokenloom.scheduler_proc.core.scheduler import MAX_LAUNCHED, Scheduler
from tokenloom.wire.messages import (
    AbortReq,
    BatchTokenIDOut,
    Drained,
    Finish,
    FlushOut,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
)
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import EvictionPolicy, SchedulingConfig

CONTEXT = 256


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % (VOCAB - 1) + 1 for i in range(length)]


class Bench:
    """`answers` and `finishes` hold the detokenizer's messages. Each call checks the invariants."""

    def __init__(
        self,
        *,
        pool_tokens: int = 512,
        page_size: int = 4,
        max_running: int = 8,
        chunk: int = 32,
        mixed_chunk: int = 0,
        max_prefill: int = 4096,
        reuse: bool = True,
        ratio: float = 1.0,
        eviction: EvictionPolicy = "lru",
        events: bool = False,
        faults: Faults | None = None,
        max_loras: int = 4,
        overlap: bool = False,
        **more: object,
    ) -> None:
        """`more` sets fields of SchedulingConfig; with `overlap` results come one step late."""
        settings = SchedulingConfig(
            max_running_requests=max_running,
            max_prefill_tokens=max_prefill,
            chunked_prefill_size=chunk,
            mixed_chunk_size=mixed_chunk,
            page_size=page_size,
            schedule_conservativeness=ratio,
            disable_radix_cache=not reuse,
            eviction_policy=eviction if reuse else "lru",
            kv_events="inproc://events" if events and reuse else None,
            **more,  # type: ignore[arg-type]
        )
        num_pages = pool_tokens // page_size + 1
        limits = Limits(VOCAB, CONTEXT, (num_pages - 1) * page_size, frozenset({EOS}), max_loras)
        self.faults = faults or Faults()
        self.scheduler = Scheduler(settings, limits, num_pages, self.faults)
        budget = min(chunk, max_prefill) if chunk else max(max_prefill, CONTEXT)
        self.runner = HashRunner(
            num_pages=num_pages,
            page_size=page_size,
            num_rows=max_running,
            budget=max(page_size, budget),
        )
        self.in_flight: deque[LateResult] = deque()
        self.most_in_flight = MAX_LAUNCHED if overlap else 1
        self.requests: dict[int, TokenizedGenerateReq] = {}
        self.answers: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.order: list[int] = []  # rids by first token
        self.drained = False
        self.starts: list[int] = []  # rids, one for each admission
        self._overtakers: dict[int, set[int]] = {}  # waiting rid -> later arrivals that started
        self.now = 0.0
        self.flushed: list[FlushOut] = []
        self.lora_news: list[LoRALoaded | LoRAUnloaded] = []
        self._watch_starts()

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int | None = 8,
        *,
        priority: int = 0,
        tenant: str = "",
        namespace: str = "",
        lora_id: int = 0,
        **sampling: object,
    ) -> int:
        rid = len(self.requests) + 1
        params = SamplingParams(max_new_tokens=max_new, seed=0, **sampling)  # type: ignore[arg-type]
        ids = array("i", prompt).tobytes()
        request = TokenizedGenerateReq(rid, ids, params, priority, tenant, namespace, lora_id)
        self.requests[rid] = request
        self.send(request)
        return rid

    def send(self, message: ToScheduler) -> None:
        self._note(self.scheduler.handle(message))
        self.scheduler.check()

    def load(self, lora_id: int) -> None:
        self.send(LoadLoRAReq(LoRARef(lora_id, f"adapter {lora_id}", f"/{lora_id}")))
        self.turn()

    def turn(self) -> None:
        """Exchange adapter messages with the scheduler, as the loop does between steps."""
        loras = self.runner.loras
        loras.follow(self.scheduler.take_lora_orders())
        for loaded in loras.take_loaded():
            self._note(self.scheduler.lora_loaded(loaded))
        loras.follow(self.scheduler.take_lora_orders())

    def abort(self, rid: int) -> None:
        self.send(AbortReq(rid))

    def expire(self, now: float) -> None:
        self.now = now
        self._note(self.scheduler.expire(now))
        self.scheduler.check()

    def wait(self, seconds: float) -> None:
        self.expire(self.now + seconds)

    def running(self) -> set[int]:
        return set(self.scheduler._running)

    def step(self, *, meanwhile: Sequence[ToScheduler] = ()) -> bool:
        """Run one step; `meanwhile` arrives while it is in flight. Return whether there was one."""
        if len(self.in_flight) == self.most_in_flight:
            self.land()
        planned = self.launch()
        for message in meanwhile:
            self.send(message)
        if not self.in_flight:
            self.expire(self.now)  # collects requests that ended without a step
            return False
        if len(self.in_flight) == self.most_in_flight or not planned:
            self.land()
        return True

    def launch(self) -> bool:
        """Launch a step; return False if there is none, or none before a result is known."""
        batch = self.scheduler.get_next_batch_to_run()
        if batch is not None:
            self.in_flight.append(self.runner.launch(batch))
        self.scheduler.check()
        return batch is not None

    def land(self) -> None:
        """Process the result of the oldest step in flight."""
        result = self.in_flight.popleft().result()
        self._note(self.scheduler.process_batch_result(result))
        self.turn()
        self.scheduler.check()

    def run(self, limit: int = 10_000) -> int:
        """Step until idle; returns the number of steps."""
        for steps in range(limit):
            if not self.step():
                if self.scheduler.idle:
                    return steps
                assert self.faults.fail_allocation_every, "work is left but no step is made"
        raise AssertionError(f"not idle after {limit} steps")

    def expected(self, rid: int) -> list[int]:
        """Return the answer of the same request alone."""
        request = self.requests[rid]
        prompt = array("i")
        prompt.frombytes(request.input_ids)
        params = request.sampling
        own = frozenset(params.stop_token_ids)
        stops = own if params.ignore_eos else own | {EOS}
        room = max(0, min(CONTEXT, self.scheduler._limits.pool_tokens) - len(prompt))
        longest = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
        return hash_answer(prompt, longest, stops, Script(lora_id=request.lora_id))

    def assert_right(self, *rids: int) -> None:
        for rid in rids or self.requests:
            finish = self.finishes[rid]
            if finish.reason == "length" or finish.matched is not None:
                assert self.answers.get(rid, []) == self.expected(rid), f"request {rid}"
            elif rid in self.answers:
                got = self.answers[rid]
                assert got == self.expected(rid)[: len(got)], f"request {rid}, cut short"

    def assert_clean(self) -> None:
        """Assert that, when idle, every row is free and every page free or cached and unlocked."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.used_tokens) == (0, 0, 0)
        assert stats.free_rows == self.scheduler._settings.max_running_requests
        assert self.faults.fail_allocation_every or stats.violations_total == 0
        self.scheduler.check()

    def audit(self) -> None:
        """Audit pages as an idle loop does."""
        problems: list[str] = []
        while self.scheduler.on_idle(problems.append):
            pass
        assert not problems

    def _watch_starts(self) -> None:
        """Record every admission and check that none was passed over too often."""
        queue, settings = self.scheduler._waiting, self.scheduler._settings
        start = queue.start
        ages = settings.schedule_policy != "priority" and settings.preemption_threshold is None

        def noted(req: Req) -> None:
            self.starts.append(req.rid)
            self._overtakers.pop(req.rid, None)
            for other in queue:
                same_line = settings.fairness == "none" or other.tenant == req.tenant
                if same_line and other.arrival < req.arrival:
                    overtakers = self._overtakers.setdefault(other.rid, set())
                    overtakers.add(req.rid)
                    if ages:
                        assert len(overtakers) <= settings.max_overtakes, "overtaken too often"
            start(req)
            for line in queue._lines.values():
                oldest = line.oldest.arrival
                assert all(arrival > oldest for arrival in line._overtakers), "too much is kept"

        queue.start = noted  # type: ignore[method-assign]

    def _note(self, messages: list[ToDetokenizer]) -> None:
        for message in messages:
            if isinstance(message, Drained):
                assert not self.drained
                self.drained = True
            if isinstance(message, FlushOut):
                self.flushed.append(message)
            if isinstance(message, LoRALoaded | LoRAUnloaded):
                self.lora_news.append(message)
                continue
            assert isinstance(message, BatchTokenIDOut | Drained | FlushOut)
            for row in message.rows if isinstance(message, BatchTokenIDOut) else ():
                assert row.rid not in self.finishes, f"request {row.rid} goes on after its end"
                first = row.rid not in self.answers
                assert (row.opened is not None) == first, "opened comes with the first row only"
                if row.token_ids and not self.answers.get(row.rid):
                    self.order.append(row.rid)
                self.answers.setdefault(row.rid, []).extend(row.token_ids)
                assert self.cached.setdefault(row.rid, row.cached_tokens) == row.cached_tokens
                if row.finish is not None:
                    self.finishes[row.rid] = row.finish
