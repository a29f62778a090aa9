"""The scheduler's own loop over a device runner, with a mailbox that is a list.

Used by the sections that compare answers and by those that time the loop.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ...scheduler_proc.core.intake import Limits
from ...scheduler_proc.core.scheduler import Scheduler
from ...scheduler_proc.event_loop import event_loop
from ...scheduler_proc.runner.device_runner import DeviceStep
from ...scheduler_proc.runner.lora_pool import LoRAMemoryPool
from ...scheduler_proc.worker_batch import ModelWorkerBatch
from ...wire.messages import (
    BatchTokenIDOut,
    DrainReq,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    ToDetokenizer,
    TokenizedGenerateReq,
    ToScheduler,
)
from ...wire.sampling import SamplingParams
from .lab import RunnerBench
from .results import CheckFailed, Report
from .rig import waits_noted

SLOT_WRITES = "adapters put into slots"
WAITS = "launches that waited for the device"


@dataclass(frozen=True)
class Request:
    rid: int
    prompt: tuple[int, ...]
    sampling: SamplingParams  # with a seed
    lora_id: int = 0

    def message(self) -> TokenizedGenerateReq:
        ids = array("i", self.prompt).tobytes()
        return TokenizedGenerateReq(self.rid, ids, self.sampling, lora_id=self.lora_id)


@dataclass(eq=False)
class Mailbox:
    """Delivers adapters, then requests, at most `at_once` unfinished ones, then a drain."""

    requests: list[Request]
    adapters: list[LoRARef]
    at_once: int
    report: Report
    answers: dict[int, list[int]] = field(default_factory=dict)
    _loaded: int = 0
    _asked: bool = False
    _sent: int = 0
    _ended: int = 0

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        if self.report.left < 0:
            raise CheckFailed(f"{self._ended} of {len(self.requests)} requests ended in time")
        if not self._asked and self.adapters:
            self._asked = True
            return [LoadLoRAReq(ref) for ref in self.adapters]
        if self._loaded < len(self.adapters):
            return []
        if self._ended == len(self.requests):
            return [DrainReq()]
        room = self.at_once - (self._sent - self._ended)
        batch = self.requests[self._sent : self._sent + room]
        self._sent += len(batch)
        if not batch and timeout_ms is None:
            raise CheckFailed("the loop sleeps although requests have not ended")
        return [request.message() for request in batch]

    def send(self, message: ToDetokenizer) -> None:
        match message:
            case LoRALoaded(ok=ok, message=why):
                if not ok:
                    raise CheckFailed(f"an adapter was not loaded: {why}")
                self._loaded += 1
            case BatchTokenIDOut(rows=rows):
                for row in rows:
                    self.answers.setdefault(row.rid, []).extend(row.token_ids)
                    if row.finish is not None:
                        if row.finish.reason not in ("length", "stop"):
                            raise CheckFailed(f"request {row.rid}: {row.finish.message}")
                        self._ended += 1


@dataclass(eq=False)
class Watched:
    """A runner that counts how steps ran and calls a watcher for each."""

    bench: RunnerBench
    before: Callable[[ModelWorkerBatch], None] = lambda batch: None
    how: Counter[str] = field(default_factory=Counter)  # and SLOT_WRITES, WAITS

    @property
    def loras(self) -> LoRAMemoryPool:
        return self.bench.runner.loras

    def prepare(self) -> bool:
        return self.bench.runner.prepare()

    def launch(self, batch: ModelWorkerBatch) -> DeviceStep:
        self.before(batch)
        with waits_noted(self.bench.device.name) as waits:
            launched = self.bench.runner.launch(batch)
        self.how[launched.how] += 1
        self.how[WAITS] += bool(waits)
        self.how[SLOT_WRITES] += sum(lora_id > 0 for _, lora_id in batch.new_loras)
        return launched


def serve(bench: RunnerBench, mailbox: Mailbox, watched: Watched, *, overlap: bool) -> None:
    """Run all requests to their end; raises CheckFailed if one does not end."""
    facts = bench.runner.facts
    limits = Limits(
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        pool_tokens=facts.max_total_tokens,
        eos_token_ids=frozenset(),
        max_loras=facts.max_loras,
    )
    scheduler = Scheduler(bench.scheduling, limits, facts.num_pages)
    event_loop(scheduler, watched, mailbox, mailbox, overlap=overlap)
