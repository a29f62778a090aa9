"""The scheduler process's loop: mailbox -> core -> runner -> core -> outbox.

Called by server.py. It reads messages between steps and sleeps when there is nothing to compute.
With overlap, a step is planned and launched before the result of the last one is read. All
decisions are made in core.
"""

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from ..wire.kv_events import KVEvent
from ..wire.messages import Draining, DrainReq, LoRALoaded, ToDetokenizer, ToScheduler
from .core.scheduler import MAX_LAUNCHED, Scheduler
from .step_log import StepLog
from .worker_batch import LaunchedStep, LoRAOrders, ModelWorkerBatch

IDLE_CHECK_MS = 1000  # idle time after which the page accounting is audited
STALLED_MS = 10  # sleep when requests wait only for a timeout or an adapter load

log = logging.getLogger(__name__)


class Inbox(Protocol):
    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]: ...


class Out(Protocol):
    def send(self, message: ToDetokenizer) -> None: ...


class Adapters(Protocol):
    @property
    def loading(self) -> bool: ...

    def follow(self, orders: LoRAOrders) -> None: ...

    def take_loaded(self) -> list[LoRALoaded]: ...


class Runner(Protocol):
    @property
    def loras(self) -> Adapters: ...

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep: ...

    def prepare(self) -> bool: ...


class KVEvents(Protocol):
    def publish(self, events: list[KVEvent]) -> None: ...


def event_loop(
    scheduler: Scheduler,
    runner: Runner,
    inbox: Inbox,
    out: Out,
    kv_events: KVEvents | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    overlap: bool = False,
) -> None:
    """Serve until the scheduler has drained. `clock`, in seconds, also measures steps."""
    step_log = StepLog(scheduler)
    in_flight: deque[tuple[ModelWorkerBatch, LaunchedStep, float]] = deque()
    landed_at = -math.inf
    most = MAX_LAUNCHED if overlap else 1
    stalled = False
    while not scheduler.drained:
        messages = _receive(scheduler, inbox, runner, stalled)
        _send(out, scheduler.expire(clock()))
        for message in messages:
            if isinstance(message, DrainReq):
                out.send(Draining())
            _send(out, scheduler.handle(message))
        for loaded in runner.loras.take_loaded():
            _send(out, scheduler.lora_loaded(loaded))
        batch = scheduler.get_next_batch_to_run()
        if batch is not None:
            launched_at = clock()
            in_flight.append((batch, runner.launch(batch), launched_at))
        stalled = not in_flight
        if len(in_flight) == most or (in_flight and batch is None):
            landed, launched, launched_at = in_flight.popleft()
            result = launched.result()
            # A step behind another one begins when that one ends; idle time does not count.
            begun_at, landed_at = max(launched_at, landed_at), clock()
            _send(out, scheduler.process_batch_result(result, landed_at - begun_at))
            step_log.after(landed, launched.how)
        runner.loras.follow(scheduler.take_lora_orders())
        if kv_events is not None:
            kv_events.publish(scheduler.take_kv_events())


def _receive(
    scheduler: Scheduler, inbox: Inbox, runner: Runner, stalled: bool
) -> list[ToScheduler]:
    """Return new messages; when idle, wait, prepare the runner, audit pages and collect garbage."""
    if not scheduler.idle:
        return inbox.receive(STALLED_MS if stalled else 0)
    if runner.loras.loading:
        return inbox.receive(STALLED_MS)
    while runner.prepare():
        if messages := inbox.receive(0):
            return messages
    messages = inbox.receive(0 if scheduler.audit.under_way else IDLE_CHECK_MS)
    if messages:
        return messages
    while scheduler.on_idle(log.error):
        if messages := inbox.receive(0):
            return messages
    gc.collect()
    gc.freeze()  # so that the next collection skips the prefix tree as it is now
    return inbox.receive(None)


def _send(out: Out, messages: Iterable[ToDetokenizer]) -> None:
    for message in messages:
        out.send(message)
