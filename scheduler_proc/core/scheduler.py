"""The Scheduler: requests in, steps out, results in, rows out. Every decision is made here.

Driven by event_loop.py: `handle` messages, `get_next_batch_to_run`, run it, `process_batch_result`.
Owns the waiting queue, the running requests and, through KVCache, all pages and rows. PURE.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...wire.config import SchedulingConfig, contradiction
from ...wire.kv_events import KVEvent
from ...wire.messages import (
    AbortReq,
    BatchTokenIDOut,
    Drained,
    DrainReq,
    Finish,
    FlushReq,
    StatsOut,
    StatsReq,
    StopMatched,
    StreamOpen,
    ToDetokenizer,
    TokenIDOut,
    TokenizedGenerateReq,
    ToScheduler,
)
from ...wire.sampling import InvalidRequest
from ..worker_batch import BatchResult, ModelWorkerBatch, RowOpen
from .cache_flush import CacheFlushes
from .conservation import check_conservation
from .intake import Limits, make_req
from .kv_allocator import PoolError
from .kv_cache import KVCache
from .new_token_ratio import NewTokenRatio
from .prefill_adder import PrefillAdder
from .req import Req, ReqState
from .retraction import choose_victim
from .schedule_batch import ScheduleBatch, row_open
from .schedule_policy import WaitingQueue

PROMPT_TAIL = 8  # prompt ids that the detokenizer sees, for the spacing of the first word


@dataclass(slots=True)
class Totals:
    """Counters since the start; they never fall."""

    retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    violations: int = 0


class Scheduler:
    def __init__(self, settings: SchedulingConfig, limits: Limits, num_pages: int) -> None:
        if problem := contradiction(settings):
            raise ValueError(problem)
        self._settings = settings
        self._limits = limits
        self._kv = KVCache(settings, num_pages)
        self._ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._waiting = WaitingQueue()
        self._running: dict[int, Req] = {}
        self._reqs: dict[int, Req] = {}  # waiting and running, by rid
        self._chunked: Req | None = None  # the one running request whose prompt is partly computed
        self._launched: ScheduleBatch | None = None
        self._endings: dict[int, Finish] = {}  # of requests that are ABORTING
        self._opened: list[RowOpen] = []
        self._rows_out: list[TokenIDOut] = []
        self._arrivals = 0
        self._step = 0
        self._flushes = CacheFlushes()
        self._draining = False
        self.drained = False
        self.now = 0.0  # on the loop's clock, in seconds; the loop says it before each turn
        self.totals = Totals()

    # -- messages

    def handle(self, message: ToScheduler) -> list[ToDetokenizer]:
        """Apply one message; returns what must be sent."""
        match message:
            case TokenizedGenerateReq():
                self._accept(message)
            case AbortReq():
                self._end_early(message.rid, Finish("abort"))
            case StopMatched():
                self._end_early(message.rid, Finish("stop"))
            case StatsReq():
                return [self.stats(message.seq)]
            case DrainReq():
                self._drain()
            case FlushReq():
                self._flushes.ask(message, self.now)
        return self._outputs()

    def _accept(self, message: TokenizedGenerateReq) -> None:
        if (
            message.rid in self._reqs
        ):  # rids are the front's: a second one is its bug, not a request
            self.totals.violations += 1
            return
        if self._draining:
            self._refuse(message, "the server is shutting down", 503)
            return
        self._arrivals += 1
        try:
            req = make_req(message, self._arrivals, self._limits)
        except InvalidRequest as error:
            self._refuse(message, error.message, 400)
            return
        self._reqs[req.rid] = req
        self._waiting.add(req)

    def _refuse(self, message: TokenizedGenerateReq, why: str, status: int) -> None:
        finish = Finish("error", message=why, status=status)
        self._rows_out.append(TokenIDOut(message.rid, finish=finish, opened=StreamOpen(b"")))

    def _end_early(self, rid: int, finish: Finish) -> None:
        """Abort and stop-string end alike. A rid that has ended already is no news."""
        req = self._reqs.get(rid)
        if req is None or req.state is ReqState.ABORTING:
            return
        if self._launched is not None and req in self._launched.reqs:
            req.move(ReqState.ABORTING, finish.reason)
            self._endings[rid] = finish
        else:
            self._finish(req, finish)

    def _drain(self) -> None:
        self._draining = True
        for req in [req for req in self._waiting if not req.admitted]:
            why = "the server is shutting down"
            self._finish(req, Finish("error", message=why, status=503))

    # -- shaping a step

    def get_next_batch_to_run(self) -> ModelWorkerBatch | None:
        """Running decodes first, then prompt pieces; None when there is nothing to compute."""
        assert self._launched is None, "the previous step's result has not been processed"
        decodes = self._decodes_with_room()
        extends = self._extends(decodes)
        if not decodes and not extends:
            return None
        self._step += 1
        self._launched = ScheduleBatch(
            step=self._step,
            reqs=decodes + [req for req, _ in extends],
            tokens=[1] * len(decodes) + [tokens for _, tokens in extends],
            num_decodes=len(decodes),
        )
        opened, self._opened = self._opened, []
        return self._launched.for_worker(self._kv.take_new_pages(), opened)

    def _decodes_with_room(self) -> list[Req]:
        """All decoding requests, each with a page for its next token; retracts until they fit."""
        retracted = False
        while True:
            decodes = [req for req in self._running.values() if req.state is ReqState.DECODING]
            needy = [kv for req in decodes if (kv := req.kv) and self._kv.is_full(kv)]
            if self._kv.make_room(len(needy)):
                break
            victim = choose_victim(self._running.values())
            if victim is None:
                raise PoolError("a lone request does not fit the pool: intake let it through")
            self._retract(victim)
            retracted = True
        for kv in needy:
            self._kv.grow(kv, 1)
        if retracted:
            self._ratio.learn(decodes)
        elif decodes:
            self._ratio.decay()
        return decodes

    def _retract(self, req: Req) -> None:
        """Back to the queue, keeping answer and arrival; computed pages stay in the tree."""
        self._kv.release(req)
        req.retractions += 1
        req.move(ReqState.WAITING, "retracted")
        del self._running[req.rid]
        self._waiting.add(req)
        if self._chunked is req:
            self._chunked = None
        self.totals.retractions += 1

    def _extends(self, decodes: list[Req]) -> list[tuple[Req, int]]:
        """The request being chunked, then waiting ones in order until one does not fit."""
        if self._chunked is None and not (self._waiting and self._kv.rows.available):
            return []
        adder = PrefillAdder(
            self._kv,
            budget=self._token_budget(len(decodes)),
            chunking=self._settings.chunked_prefill_size > 0,
            ratio=self._ratio.value,
        )
        adder.reserve_for(decodes)
        if self._chunked is not None and not adder.continue_chunked(self._chunked):
            return []
        while (req := self._waiting.head()) and self._kv.rows.available and not adder.was_cut:
            if not adder.add_new(req):
                break
            self._admit(req)
        self._chunked = adder.added[-1][0] if adder.was_cut else None
        return adder.added

    def _token_budget(self, num_decodes: int) -> int:
        """What decodes leave of the step; never less than a page, so that prompts get on."""
        settings = self._settings
        budget = settings.max_prefill_tokens
        if settings.chunked_prefill_size:
            budget = min(budget, settings.chunked_prefill_size)
            if num_decodes and settings.mixed_chunk_size:
                budget = min(budget, settings.mixed_chunk_size)
        return max(settings.page_size, budget - num_decodes)

    def _admit(self, req: Req) -> None:
        kv = req.kv
        assert kv is not None
        self._waiting.remove(req)
        self._running[req.rid] = req
        req.move(ReqState.EXTENDING, "admitted")
        self._opened.append(row_open(req))
        if not req.admitted:
            req.admitted = True
            req.cached_tokens = kv.computed
            self.totals.prompt_tokens += req.prompt_len
            self.totals.cached_tokens += kv.computed

    # -- a step's result

    def process_batch_result(self, result: BatchResult) -> list[ToDetokenizer]:
        """Append tokens, decide finishes, hand pages to the tree; returns what must be sent."""
        batch = self._launched
        assert batch is not None, "a result without its batch"
        assert batch.step == result.step, "a result of another step"
        self._launched = None
        sampled = iter(result.next_ids)
        for req, tokens in zip(batch.reqs, batch.tokens, strict=True):
            kv = req.kv
            assert kv is not None
            kv.computed += tokens
            self._advance(req, next(sampled) if kv.computed == len(req.ids) else None)
        return self._outputs()

    def _advance(self, req: Req, token_id: int | None) -> None:
        if req.state is ReqState.ABORTING:
            self._finish(req, self._endings.pop(req.rid))
        elif token_id is None:
            self._kv.commit(req)
        elif token_id < 0:
            why = "the model gave no finite probabilities for this request"
            self._finish(req, Finish("error", message=why, status=500), keep=False)
        else:
            self._append(req, token_id)

    def _append(self, req: Req, token_id: int) -> None:
        if req.state is ReqState.EXTENDING:
            req.move(ReqState.DECODING, "prompt computed")
            self._kv.commit(req)
        req.ids.append(token_id)
        self.totals.generated_tokens += 1
        finish = req.finish_for(token_id)
        if finish is None:
            self._rows_out.append(self._row(req, (token_id,), None))
        else:
            self._finish(req, finish, (token_id,))

    def _finish(
        self, req: Req, finish: Finish, token_ids: tuple[int, ...] = (), *, keep: bool = True
    ) -> None:
        """The one way out, from every state: frees all, tells once."""
        if req.state is ReqState.WAITING:
            self._waiting.remove(req)
        else:
            del self._running[req.rid]
        if self._chunked is req:
            self._chunked = None
        self._kv.release(req, keep=keep)
        req.move(ReqState.FINISHED, finish.reason)
        del self._reqs[req.rid]
        self._rows_out.append(self._row(req, token_ids, finish))

    # -- what others see

    @property
    def idle(self) -> bool:
        return not self._reqs

    def check(self) -> None:
        """Raises ConservationError if a page, lock or row is lost or owned twice."""
        check_conservation(self._kv, self._running.values())

    def on_idle(self, report: Callable[[str], None]) -> None:
        """Start afresh; a broken law is counted and reported, and the server goes on."""
        self._ratio.reset()
        try:
            self.check()
        except AssertionError as error:
            self.totals.violations += 1
            report(str(error))

    def stats(self, seq: int = 0) -> StatsOut:
        size = self._settings.page_size
        free, evictable = self._kv.pages.available, self._kv.tree.evictable_pages
        return StatsOut(
            seq=seq,
            step=self._step,
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=(self._kv.pages.capacity - free - evictable) * size,
            evictable_tokens=evictable * size,
            free_tokens=free * size,
            free_rows=self._kv.rows.available,
            new_token_ratio=self._ratio.value,
            retractions_total=self.totals.retractions,
            prompt_tokens_total=self.totals.prompt_tokens,
            cached_tokens_total=self.totals.cached_tokens,
            generated_tokens_total=self.totals.generated_tokens,
            violations_total=self.totals.violations,
            evicted_pages_total=self._kv.tree.evicted_total,
            tree_nodes=self._kv.tree.num_nodes,
            tree_pages=evictable + self._kv.tree.locked_pages,
        )

    def _row(self, req: Req, token_ids: tuple[int, ...], finish: Finish | None) -> TokenIDOut:
        opened = None
        if not req.announced:
            req.announced = True
            tail = req.ids[max(0, req.prompt_len - PROMPT_TAIL) : req.prompt_len]
            opened = StreamOpen(
                tail.tobytes(),
                req.sampling.stop,
                req.sampling.skip_special_tokens,
                req.sampling.no_stop_trim,
            )
        return TokenIDOut(req.rid, token_ids, finish, req.cached_tokens, opened)

    def expire(self, now: float) -> list[ToDetokenizer]:
        """Time goes on: returns what must be said because of it."""
        self.now = now
        return self._outputs()

    def take_kv_events(self) -> list[KVEvent]:
        """What the prefix tree stored and removed since the last call; nothing unless wanted."""
        return self._kv.events.take() if self._kv.events is not None else []

    def _outputs(self) -> list[ToDetokenizer]:
        messages: list[ToDetokenizer] = []
        if self._rows_out:
            messages.append(BatchTokenIDOut(self._rows_out))
            self._rows_out = []
        messages += self._flushes.answer(self._kv, len(self._running), len(self._waiting), self.now)
        if self._draining and self.idle and not self.drained:
            self.drained = True
            messages.append(Drained())
        return messages
