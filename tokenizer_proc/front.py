"""Front: request intake and delivery; the object that every door calls.

Owns the session table, the scheduler's facts and the checks at the edge. Lives in one asyncio loop;
`server` feeds it messages, doors call `submit` and read RequestStreams. HTTP and client sockets do
not enter.
"""

import asyncio
import secrets
from array import array
from collections.abc import Sequence

import msgspec

from ..wire.channel import Outbox
from ..wire.client_messages import ChatMessage
from ..wire.lora_config import LoRAConfig
from ..wire.messages import (
    AbortReq,
    BatchStrOut,
    ChildDied,
    Drained,
    DrainReq,
    Finish,
    FlushOut,
    FlushReq,
    LoopStamp,
    LoRALoaded,
    LoRAUnloaded,
    SchedulerInfo,
    SchedulerReady,
    StatsOut,
    StatsReq,
    StrOut,
    ToFront,
    TokenizedGenerateReq,
)
from ..wire.sampling import InvalidRequest, SamplingParams, check_sampling
from ..wire.strays import Strays
from .adapters import Adapters
from .chat import ChatRenderer
from .encode import TextEncoder
from .encode_queue import EncodeQueue
from .errors import Refused
from .health import Health
from .labels import NO_LABELS, Labels
from .lengths import NO_LIMIT, check_chars, check_fits, check_ids, resolve_lengths, room
from .limits import (
    FLUSH_ANSWER_SECONDS,
    MAX_FLUSH_SECONDS,
    RETRY_AFTER_DRAINING,
    RETRY_AFTER_LOADING,
)
from .replies import Replies
from .sessions import Delivery, Session, SessionTable

NO_LORA = LoRAConfig()
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
RANDOM_SEED = -1  # the value that SGLang's and llama.cpp's clients send

_GONE = Finish(
    "error", None, "the server stopped before the request was finished", 503, RETRY_AFTER_DRAINING
)


class RequestStream:
    """Output of one request for one reader: `async for row in stream`, then `close()`."""

    def __init__(self, front: "Front", session: Session) -> None:
        self.prompt_tokens = session.prompt_tokens
        self._front = front
        self._session = session
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> StrOut:
        """Return all output since the last row, merged; the row with `finish` is the last."""
        while True:
            if self._session.replied:
                raise StopAsyncIteration
            row = self._session.take()
            if row is not None:
                return row
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def abort(self) -> None:
        """Ask the scheduler to abort the request; its last row carries the remaining output."""
        self._front.abort_stream(self._session)

    def close(self) -> None:
        """End the iteration, and abort the request if it still runs; idempotent."""
        self._front.close_stream(self._session)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Front:
    def __init__(
        self,
        model_name: str,
        scheduler: Outbox,
        max_queued_requests: int,
        lora: LoRAConfig = NO_LORA,
        strays: Strays | None = None,
    ) -> None:
        self.strays = strays or Strays()  # shared with the mailbox
        self.model_name = model_name
        self.recommended: SamplingParams | None = None  # sampling from the model's own files
        self.adapters = Adapters(
            lora, model_name, scheduler.send, max_queued_requests, self.require_ready
        )
        self.info: SchedulerInfo | None = None
        self.started = asyncio.Event()  # SchedulerReady has arrived
        self.drained = asyncio.Event()
        self.failed = asyncio.Event()  # another process died: no request can be served
        self.health = Health(lambda: self.submit([0], _ONE_TOKEN))
        self._scheduler = scheduler
        self._sessions = SessionTable(max_queued_requests, self._left)
        self._streams: dict[int, RequestStream] = {}
        self._text: tuple[TextEncoder, ChatRenderer] | None = None
        self._encoding = EncodeQueue(max_queued_requests)
        self._stats: Replies[StatsOut] = Replies()
        self._flushes: Replies[FlushOut] = Replies()

    def use_text(self, encoder: TextEncoder, renderer: ChatRenderer) -> None:
        """Set the encoders once the tokenizer is loaded."""
        self._text = (encoder, renderer)
        self._note_started()

    async def load_first_adapters(self) -> None:
        """Load the adapters of --lora before anything is served. Raises AdapterError."""
        await self.adapters.load_first()
        self._note_started()

    def dispatch(self, message: ToFront) -> None:
        if isinstance(message, LoopStamp) and not message.relayed:
            self.health.progress.stamped(message)
            return
        self.health.progress.relayed()
        match message:
            case BatchStrOut(rows=rows):
                for row in rows:
                    self._deliver(row)
            case StatsOut(seq=seq) if self._stats.take(seq, message):
                pass
            case FlushOut(seq=seq) if self._flushes.take(seq, message):
                pass
            case LoRALoaded() | LoRAUnloaded() if self.adapters.take(message):
                pass
            case SchedulerReady(info=info) if self.info is None:
                self.info = info
                self._note_started()
            case Drained() if self.draining and not self.drained.is_set():
                self._end_all(_GONE)
            case ChildDied(name=name, how=how) if name in ("scheduler", "detokenizer"):
                self._sessions.draining = True
                self.failed.set()
                reason = f"{_GONE.message}: its {name} process died ({how})"
                self._end_all(msgspec.structs.replace(_GONE, message=reason))
            case LoopStamp():
                pass  # it was relayed, which is all that it says
            case _:
                self.strays.drop_message(message)

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests and let running ones finish; `drained` is set at the end."""
        if self._sessions.draining:
            return
        self._sessions.draining = True
        self._scheduler.send(DrainReq(timeout_s))

    def _note_started(self) -> None:
        if self.info is not None and self._text is not None and self.adapters.complete:
            self.started.set()

    def _deliver(self, row: StrOut) -> None:
        match self._sessions.deliver(row):
            case Delivery.LATE:
                return
            case Delivery.CUT:
                self._scheduler.send(AbortReq(row.rid))
                self._streams.pop(row.rid).wake()
            case Delivery.WAKE if row.finish is not None:
                self._streams.pop(row.rid).wake()
            case Delivery.WAKE:
                self._streams[row.rid].wake()

    def _end_all(self, finish: Finish) -> None:
        """End everything that waits for the scheduler with `finish`: it has gone."""
        self.drained.set()
        for session in self._sessions.fail_all(finish):
            self._streams.pop(session.rid).wake()
        self.adapters.end_all(finish)
        gone = Refused.of(finish)
        self._stats.fail_all(gone)
        self._flushes.fail_all(gone)

    @property
    def draining(self) -> bool:
        return self._sessions.draining

    @property
    def ready(self) -> bool:
        serves = self.started.is_set() and not self._sessions.draining
        return serves and self.health.problem is None

    @property
    def in_flight(self) -> int:
        return len(self._sessions)

    @property
    def late_rows(self) -> int:
        return self._sessions.late_rows

    def require_ready(self) -> SchedulerInfo:
        """Return the scheduler's facts; raises Refused while loading and draining."""
        if self._sessions.draining:
            raise Refused(503, "the server is shutting down", RETRY_AFTER_DRAINING)
        if self.info is None or not self.started.is_set():
            raise Refused(503, "the model is loading", RETRY_AFTER_LOADING)
        return self.info

    async def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode plain prompts; raises InvalidRequest for the first that cannot fit the context."""
        encoder, _ = self._require_text(max(map(len, texts)))
        info = self.require_ready()

        def encode(text: str) -> list[int]:
            ids = encoder.encode(text)
            check_fits(len(ids), info)
            return ids

        return await self._encoding.run(encode, texts, len)

    async def encode_chat(self, messages: list[ChatMessage]) -> list[int]:
        """Encode a conversation up to the point where the assistant's answer begins."""
        chars = sum(len(message.content) + len(message.name or "") for message in messages)
        _, renderer = self._require_text(chars)
        (ids,) = await self._encoding.run(renderer.encode, [messages], lambda _: chars)
        return ids

    def room(self, prompt_tokens: int) -> int:
        """Return the most answer tokens that fit behind such a prompt; below 1: none."""
        return self.context_length() - prompt_tokens

    def context_length(self) -> int:
        """Most tokens of prompt and answer together. Raises Refused while loading and draining."""
        info = self.require_ready()
        return room(info)[0]

    def submit(
        self,
        input_ids: list[int],
        sampling: SamplingParams,
        labels: Labels = NO_LABELS,
        lora_id: int = 0,
    ) -> RequestStream:
        """Check everything and hand the request to the scheduler.

        `lora_id` comes from `adapters.using`, inside whose block this must be called. Raises
        InvalidRequest (the request can never be served) or Refused (not now).
        """
        info = self.require_ready()
        if sampling.max_new_tokens == NO_LIMIT:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=None)
        check_sampling(sampling, info.vocab_size)
        check_fits(len(input_ids), info)  # before the ids are iterated
        check_ids(input_ids, info.vocab_size)
        sampling = resolve_lengths(len(input_ids), sampling, info)
        if sampling.seed in (None, RANDOM_SEED):
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        session = self._sessions.open(len(input_ids), lora_id, labels.tenant)
        self.adapters.registry.admit(lora_id)
        # array("i") is int32 in native order, which is little-endian on every platform of torch.
        ids = array("i", input_ids).tobytes()
        try:
            self._scheduler.send(
                TokenizedGenerateReq(
                    session.rid,
                    ids,
                    sampling,
                    labels.priority,
                    labels.tenant,
                    labels.namespace,
                    lora_id,
                )
            )
        except BaseException:
            self._sessions.unsent(session)
            raise
        self._sessions.submitted(session)
        stream = self._streams[session.rid] = RequestStream(self, session)
        return stream

    def abort_stream(self, session: Session) -> None:
        if session.rid in self._streams:
            self._scheduler.send(AbortReq(session.rid))

    def close_stream(self, session: Session) -> None:
        if self._sessions.close(session):
            del self._streams[session.rid]
            self._scheduler.send(AbortReq(session.rid))

    def _left(self, session: Session) -> None:
        self.adapters.registry.release(session.lora_id)

    async def stats(self) -> StatsOut:
        """Ask the scheduler for a snapshot; the caller sets the timeout."""
        return await self._stats.ask(lambda seq: self._scheduler.send(StatsReq(seq)))

    async def flush_cache(self, timeout_s: float) -> int:
        """Evict cached prefixes, waiting up to `timeout_s` until idle; return the pages freed.

        Raises InvalidRequest, or Refused with 409 and the reason.
        """
        self.require_ready()
        if not 0 <= timeout_s <= MAX_FLUSH_SECONDS:  # NaN fails every comparison
            raise InvalidRequest(
                "timeout", f"timeout must be between 0 and {MAX_FLUSH_SECONDS:g} s, got {timeout_s}"
            )
        if len(self._flushes):  # at most one flush waits
            raise Refused(409, "another flush of the cache is waiting")
        patience = timeout_s + FLUSH_ANSWER_SECONDS
        try:
            async with asyncio.timeout(patience):
                out = await self._flushes.ask(
                    lambda seq: self._scheduler.send(FlushReq(seq, timeout_s))
                )
        except TimeoutError:
            raise Refused(503, f"the scheduler did not answer within {patience:g} s") from None
        if not out.ok:
            raise Refused(409, out.message)
        return out.pages

    def _require_text(self, chars: int) -> tuple[TextEncoder, ChatRenderer]:
        """Return the encoders; raises InvalidRequest if the text is too long to tokenise."""
        check_chars(chars, self.require_ready())
        if self._text is None:
            raise Refused(503, "the model is loading", RETRY_AFTER_LOADING)
        return self._text
