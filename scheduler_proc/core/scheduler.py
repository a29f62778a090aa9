"""Scheduler: turns requests into steps, and the results of steps into answer tokens.

Driven by event_loop.py: `handle` messages, `get_next_batch_to_run`, run it, `process_batch_result`.
A step may be planned before the result of the last is known: running requests are assumed to decode
up to their limit, and one that turns out to have ended wastes one row. No request is retracted
while a result is outstanding, because the result may free the missing pages. Owns the waiting
queue, the running requests and, through KVCache, all pages and rows. PURE.
"""

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from ...wire.kv_events import KVEvent
from ...wire.messages import (
    AbortReq,
    Drained,
    DrainReq,
    Finish,
    FlushReq,
    LoadLoRAReq,
    LoRALoaded,
    StatsOut,
    StatsReq,
    StopMatched,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
    UnloadLoRAReq,
)
from ...wire.sampling import InvalidRequest
from ...wire.scheduling_config import SchedulingConfig, contradiction
from ..worker_batch import BatchResult, LoRAOrders, ModelWorkerBatch, RowOpen
from .admission import Admission
from .cache_flush import CacheFlushes
from .conservation import IdleAudit, check_conservation
from .failures import CUT_SHORT, DRAINING, NO_PAGES, NOT_FINITE, refusal_for
from .faults import Faults
from .intake import Limits, make_req
from .kv_cache import KVCache
from .lora_slots import AdapterError, LoRASlots
from .preemption import Preemption, slot_margin
from .prefill_adder import PrefillAdder
from .queue_limits import QueueLimits
from .req import Req, ReqState
from .retraction import all_but_the_last, in_giving_order
from .rows_out import RowsOut
from .schedule_batch import ScheduleBatch, row_open
from .step_budget import StepBudget
from .totals import QueueCounts, Totals
from .waiting_queue import WaitingQueue

MAX_LAUNCHED = 2  # steps
MAX_FAILED_ALLOCATIONS = 3  # per request; at the last one it ends with an error


class Scheduler:
    def __init__(
        self,
        settings: SchedulingConfig,
        limits: Limits,
        num_pages: int,
        faults: Faults | None = None,
    ) -> None:
        if problem := contradiction(settings):
            raise ValueError(problem)
        self._settings = settings
        self._limits = limits
        self._kv = KVCache(settings, num_pages, faults)
        self._faults = faults or Faults()
        self.audit = IdleAudit(self._kv)
        self._admission = Admission(settings)
        self._waiting = WaitingQueue(settings, self._kv)
        self._queue_limits = QueueLimits(settings)
        self._budget = StepBudget(settings)
        self._running: dict[int, Req] = {}  # requests that hold pages, by rid
        self._reqs: dict[int, Req] = {}  # waiting and running, by rid
        self._chunked: Req | None = None  # the running request whose prompt is partly launched
        self._launched: deque[ScheduleBatch] = deque()  # steps without a result, oldest first
        self._settle_first = False  # plan no step until all outstanding results are known
        self._opened: list[RowOpen] = []
        self._rows_out = RowsOut()
        self._arrivals = 0
        self._step = 0
        self._computed_tokens = 0  # the waiting queue's clock
        self._flushes = CacheFlushes()
        self._loras = LoRASlots(limits.max_loras, slot_margin(settings))
        self._draining = False
        self._drain_ends: float | None = None
        self.drained = False
        self.now = 0.0  # seconds on the loop's clock, set by `expire` before each turn
        self.totals = Totals()

    # -- messages

    def handle(self, message: ToScheduler) -> list[ToDetokenizer]:
        """Apply one message and return the messages to send."""
        match message:
            case TokenizedGenerateReq():
                self._accept(message)
            case AbortReq():
                self._end_early(message.rid, Finish("abort"))
            case StopMatched():
                self._end_early(message.rid, Finish("stop"))
            case StatsReq():
                return [*self._outputs(), self.stats(message.seq)]
            case DrainReq(timeout_s=timeout_s):
                self._drain(timeout_s)
            case FlushReq():
                self._flushes.ask(message, self.now)
            case LoadLoRAReq() | UnloadLoRAReq():
                self.totals.violations += not self._loras.follow(message)
        return self._outputs()

    def expire(self, now: float) -> list[ToDetokenizer]:
        """Set the time and end requests past a deadline. Called before a turn's messages."""
        self.now = now
        ended = self._queue_limits.expired(now)
        if self._drain_ends is not None and now >= self._drain_ends:
            ended += [(rid, CUT_SHORT) for rid in self._reqs]
        for rid, finish in ended:
            self._end_early(rid, finish)
        return self._outputs()

    def lora_loaded(self, loaded: LoRALoaded) -> list[ToDetokenizer]:
        """Record the outcome of a load that `take_lora_orders` ordered."""
        self._loras.end_load(loaded)
        return self._outputs()

    def take_lora_orders(self) -> LoRAOrders:
        """Take the adapters that the runner must load and drop; called at the end of a turn."""
        return self._loras.take_orders()

    def _accept(self, message: TokenizedGenerateReq) -> None:
        if message.rid in self._reqs or self._rows_out.speak_of(message.rid):
            # the front chooses rids, so a duplicate is a bug of the front and gets no answer
            self.totals.violations += 1
            return
        if self._draining:
            self._rows_out.refuse(message.rid, DRAINING)
            return
        self._arrivals += 1
        try:
            req = make_req(message, self._arrivals, self._limits)
            self._loras.accept(req.lora_id)
        except (InvalidRequest, AdapterError) as error:
            self._rows_out.refuse(message.rid, refusal_for(error))
            return
        if self._settings.low_priority_first:
            req.priority = -req.priority
        displaced, refusal = self._queue_limits.admit(req)
        if refusal is not None:
            self._loras.leave(req.lora_id)
            self._rows_out.refuse(message.rid, refusal)
            return
        for lesser, finish in displaced:
            self._finish(lesser, finish)
        req.arrived_at = self._computed_tokens
        self._reqs[req.rid] = req
        self._waiting.add(req)
        self._queue_limits.enter(req, self.now)

    def _end_early(self, rid: int, finish: Finish) -> None:
        """End a request on abort, stop string or timeout; ignore a rid that has already ended."""
        req = self._reqs.get(rid)
        if req is not None and req.state is not ReqState.ENDING:
            self._finish(req, finish)

    def _drain(self, timeout_s: float | None) -> None:
        self._draining = True
        self._drain_ends = None if timeout_s is None else self.now + timeout_s
        for req in [req for req in self._waiting if not req.admitted]:
            self._finish(req, DRAINING)

    # -- planning a step

    def get_next_batch_to_run(self) -> ModelWorkerBatch | None:
        """Plan and launch a step: running decodes first, then prompt chunks. Return None when there
        is nothing to compute, or when the result of a launched step must be known first.
        """
        assert len(self._launched) < MAX_LAUNCHED, "results must be processed first"
        self._settle_first &= bool(self._launched)
        decodes = [] if self._settle_first else self._decodes_with_room()
        if self._settle_first:
            return None
        extends = self._extends(decodes)
        decodes = [req for req in decodes if req.state is ReqState.DECODING]  # drop the preempted
        decodes.sort(key=attrgetter("lora_id"))  # rows of one adapter read its weights together
        if not decodes and not extends:
            return None
        self._step += 1
        batch = ScheduleBatch(self._step, decodes, extends)
        self._launched.append(batch)
        opened, self._opened = self._opened, []
        return batch.launch(self._kv.take_new_pages(), opened, self._loras)

    def _decodes_with_room(self) -> list[Req]:
        """Give each decoding request a page for its next token, retracting until they fit."""
        before = self.totals.retractions
        if self._faults.retracts():
            if self._must_settle():
                self._faults.postpone_retraction()
                return []
            for forced in in_giving_order(self._running.values())[:1]:
                self._retract(forced)
        decodes = [req for req in self._running.values() if req.goes_on_decoding]
        needy = {req.rid: req for req in decodes if req.kv and self._kv.is_full(req.kv)}
        if len(needy) > self._kv.reachable_pages:
            if self._must_settle():
                return []
            self._retract_for(needy)
            decodes = [req for req in decodes if req.state is ReqState.DECODING]
        self._kv.make_room(len(needy))
        for req in needy.values():
            if req.kv and not self._kv.grow(req.kv, 1):
                decodes.remove(req)
                self._allocation_failed(req)
        self._admission.after_decodes(decodes, retracted=self.totals.retractions > before)
        return decodes

    def _retract_for(self, needy: dict[int, Req]) -> None:
        """Retract until those left in `needy` can each get a page; fail the last if it cannot."""
        for victim in all_but_the_last(self._running.values()):
            self._retract(victim)
            needy.pop(victim.rid, None)
            if len(needy) <= self._kv.reachable_pages:
                return
        self._finish(needy.popitem()[1], NO_PAGES)

    def _must_settle(self) -> bool:
        """Whether a retraction must wait for outstanding results; if so, stop planning steps."""
        self._settle_first = bool(self._launched)
        return self._settle_first

    def _retract(self, req: Req) -> None:
        """Requeue a request with its answer and arrival; its computed pages stay in the tree."""
        self._kv.release(req)
        req.retractions += 1
        req.move(ReqState.WAITING, "retracted")
        self._stop_running(req)
        self._waiting.add(req)
        self.totals.retractions += 1

    def _stop_running(self, req: Req) -> None:
        del self._running[req.rid]
        self._loras.retire(req.lora_id, req.priority)
        self._chunked = None if self._chunked is req else self._chunked

    def _allocation_failed(self, req: Req) -> None:
        """Retry a request that was refused its promised pages; fail it the third time."""
        self.totals.violations += 1
        req.failed_allocations += 1
        if req.failed_allocations >= MAX_FAILED_ALLOCATIONS:
            self._finish(req, NO_PAGES)
        elif req.holds_pages and not req.in_flight:  # otherwise it only misses this step
            self._retract(req)

    def _extends(self, decodes: list[Req]) -> list[tuple[Req, int]]:
        """Choose prompt chunks: the chunked request, then waiting ones that fit, or vice versa."""
        if self._chunked is None and not self._waiting:
            return []
        budget = self._budget.beside(len(decodes))
        adder = PrefillAdder(self._kv, self._admission, self._running.values(), budget)
        if self._chunked is not None and adder.whole_ones_first(self._chunked, self._step):
            self._start_waiting(adder)
        if self._chunked is None or adder.continue_chunked(self._chunked):
            self._start_waiting(adder)
            self._chunked = adder.added[-1][0] if adder.was_cut else None
        if adder.failed is not None:
            self._allocation_failed(adder.failed)
        return adder.added

    def _start_waiting(self, adder: PrefillAdder) -> None:
        preemption = Preemption(self._settings, self._loras, self._running.values(), adder)
        extending = [req for batch in self._launched for req, _ in batch.extends]
        extending += [self._chunked] if self._chunked is not None else []
        candidates = self._waiting.candidates(
            self._computed_tokens, extending, preemption.lacks_slot
        )
        while not adder.was_cut and (self._kv.rows.available or preemption.allowed):
            req = None if self._settle_first else next(candidates, None)
            if req is None or not adder.has_budget_for(req):
                break
            if preemption.starts(req) or self._preempt_for(req, preemption):
                self._admit(req)
            else:
                preemption.end()  # only the first that does not fit may preempt
        self._loras.end_planning()

    def _preempt_for(self, req: Req, preemption: Preemption) -> bool:
        """Retract running requests of lower priority if that lets `req` start, and start it."""
        victims = preemption.victims_for(req)
        if not victims or self._must_settle():
            return False
        for victim in victims:
            self._retract(victim)
        return preemption.starts(req)

    def _admit(self, req: Req) -> None:
        kv = req.kv
        assert kv is not None
        self._waiting.start(req)
        self._running[req.rid] = req
        self._loras.admit(req.lora_id, req.priority)
        req.move(ReqState.EXTENDING, "admitted")
        self._opened.append(row_open(req))
        if not req.admitted:
            self._queue_limits.start(req)
            req.admitted = True
            req.cached_tokens = kv.computed
            self.totals.prompt_tokens += req.prompt_len
            self.totals.cached_tokens += kv.computed

    # -- a step's result

    def process_batch_result(
        self, result: BatchResult, seconds: float | None = None
    ) -> list[ToDetokenizer]:
        """Append tokens, finish requests, commit pages to the tree; return the messages to send."""
        assert self._launched, "a result without its batch"
        batch = self._launched.popleft()
        assert batch.step == result.step, "a result of another step"
        self._computed_tokens += batch.num_tokens
        self._budget.after_step(batch, seconds)
        for req, token_id in batch.land(result):
            self._advance(req, token_id)
        for req, _ in batch.extends:
            if req.holds_pages:
                self._kv.commit(req)
        return self._outputs()

    def _advance(self, req: Req, token_id: int | None) -> None:
        if req.state is ReqState.ENDING:
            if not req.in_flight:
                self._leave(req, "landed")
        elif token_id is not None and token_id < 0:
            self._finish(req, NOT_FINITE)
        elif token_id is not None:
            self._append(req, token_id)

    def _append(self, req: Req, token_id: int) -> None:
        req.ids.append(token_id)
        self.totals.generated_tokens += 1
        self._waiting.charge_answer(req)
        if finish := req.finish_for(token_id):
            self._finish(req, finish, (token_id,))
        else:
            self._rows_out.add(req, (token_id,), None)

    def _finish(self, req: Req, finish: Finish, token_ids: tuple[int, ...] = ()) -> None:
        """End a request: report it once, and free it as soon as no launched step uses it."""
        self._queue_limits.end(req)
        self._waiting.end(req)
        self._rows_out.add(req, token_ids, finish)
        if req.in_flight:
            req.move(ReqState.ENDING, finish.reason)
            self._chunked = None if self._chunked is req else self._chunked
        else:
            self._leave(req, finish.reason)

    def _leave(self, req: Req, why: str) -> None:
        if req.holds_pages:
            self._stop_running(req)
        self._loras.leave(req.lora_id)
        self._kv.release(req)
        req.move(ReqState.FINISHED, why)
        del self._reqs[req.rid]

    # -- state for callers

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs and no output row is unsent."""
        return not self._reqs and not self._rows_out

    def check(self) -> None:
        """Raise ConservationError if a page, lock or row is lost or owned twice."""
        check_conservation(self._kv, self._running.values())

    def on_idle(self, report: Callable[[str], None]) -> bool:
        """Reset the new-token ratio and audit a slice of the pool; False when the audit is done."""
        self._admission.ratio.reset()
        return self.audit.go_on(self.totals, report)

    def stats(self, seq: int = 0) -> StatsOut:
        counts = QueueCounts(self._step, len(self._running), len(self._waiting))
        return self.totals.snapshot(seq, counts, self._kv, self._admission.ratio.value)

    def take_kv_events(self) -> list[KVEvent]:
        """Take the prefix tree's events since the last call; empty unless kv_events is set."""
        return self._kv.events.take() if self._kv.events is not None else []

    def _outputs(self) -> list[ToDetokenizer]:
        messages: list[ToDetokenizer] = [*self._rows_out.take(), *self._loras.take_news()]
        messages += self._flushes.answer(self._kv, len(self._running), len(self._waiting), self.now)
        if self._draining and self.idle and not self._loras.loading and not self.drained:
            self.drained = True
            messages.append(Drained())
        return messages
