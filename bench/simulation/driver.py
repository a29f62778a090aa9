"""The real scheduler driven by timed arrivals, on a logical clock. PURE.

The owner of a scheduler and a HashRunner moves them by `deliver`, `launch` and `land`, in any order
that a server could see, or lets `run` play a whole list of arrivals. There is no randomness here:
the same messages give the same steps. A request's seed is its rid, so that rows can be told apart.
"""

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import msgspec

from ...scheduler_proc.core.scheduler import Scheduler
from ...scheduler_proc.worker_batch import ModelWorkerBatch
from ...wire.messages import (
    BatchTokenIDOut,
    Finish,
    ToDetokenizer,
    TokenIDOut,
    TokenizedGenerateReq,
    ToScheduler,
)
from ...wire.sampling import SamplingParams
from ..summary import Spread, spread
from .hash_model import HashRunner, LateResult


class Stuck(RuntimeError):
    """Requests are left, none will arrive, and the scheduler plans no step."""


@dataclass(slots=True, frozen=True)
class Arrival:
    at: float
    message: ToScheduler


def request(
    rid: int,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    priority: int = 0,
    tenant: str = "",
    namespace: str = "",
    lora_id: int = 0,
) -> TokenizedGenerateReq:
    """Make the message that the front would send, with the rid as seed."""
    seeded = msgspec.structs.replace(sampling, seed=rid)
    ids = array("i", prompt).tobytes()
    return TokenizedGenerateReq(rid, ids, seeded, priority, tenant, namespace, lora_id)


@dataclass(slots=True, eq=False)
class Course:
    """History of one request, in seconds of the logical clock."""

    rid: int
    arrived: float
    prompt_tokens: int
    tenant: str
    admissions: list[float] = field(default_factory=list)  # more than one: it was retracted
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None
    ended: float = math.nan

    @property
    def wait(self) -> float:
        """Seconds in the queue before the first step; NaN if it never ran."""
        return self.admissions[0] - self.arrived if self.admissions else math.nan

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrived if self.token_times else math.nan

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def retractions(self) -> int:
        return max(0, len(self.admissions) - 1)


class Report(msgspec.Struct, frozen=True):
    """Figures of a run; times are logical."""

    requests: int
    finished: dict[str, int]  # by finish reason
    steps: int
    seconds: float
    prompt_tokens: int  # of requests that ran
    cached_tokens: int
    output_tokens: int
    retractions: int
    ttft_s: Spread
    inter_token_s: Spread
    wait_s: Spread

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


class Driver:
    """`now` is the logical clock; `land` advances it by the step's time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: HashRunner,
        step_time: Callable[[ModelWorkerBatch], float],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.now = 0.0
        self.steps = 0
        self.in_flight: deque[tuple[ModelWorkerBatch, LateResult]] = deque()
        self.courses: dict[int, Course] = {}
        self.starts: list[int] = []  # rids in the order in which they were admitted
        self._ended: deque[Course] = deque()
        self._numbers = count()
        self._step_time = step_time

    def deliver(self, message: ToScheduler, at: float | None = None) -> list[ToDetokenizer]:
        """Between two steps, or while one is in flight. `at`: when it came, where not just now."""
        if at is None:
            at = self.now
        if isinstance(message, TokenizedGenerateReq) and message.rid not in self.courses:
            tokens = len(message.input_ids) // 4
            self.courses[message.rid] = Course(message.rid, at, tokens, message.tenant)
        return self._noted(self.scheduler.handle(message))

    def pass_time(self, seconds: float) -> list[ToDetokenizer]:
        """Advance the clock and let the scheduler expire requests."""
        self.now += seconds
        return self._noted(self.scheduler.expire(self.now))

    def launch(self) -> ModelWorkerBatch | None:
        """Plan the next step; None if there is nothing to compute, or a result is needed first."""
        batch = self.scheduler.get_next_batch_to_run()
        if batch is None:
            return None
        self.in_flight.append((batch, self.runner.launch(batch)))
        for entry in batch.opened:
            assert entry.sampling.seed is not None
            self.courses[entry.sampling.seed].admissions.append(self.now)
            self.starts.append(entry.sampling.seed)
        return batch

    def land(self, measured: float | None = None) -> list[ToDetokenizer]:
        """Compute the oldest step in flight, advance the clock and process its result.

        `measured` replaces the step time reported to the scheduler.
        """
        batch, launched = self.in_flight.popleft()
        result = launched.result()
        self.steps += 1
        seconds = self._step_time(batch)
        self.now += seconds
        measured = seconds if measured is None else measured
        said = self._noted(self.scheduler.process_batch_result(result, measured))
        return said + self.pass_time(0.0)

    def run(
        self,
        arrivals: Iterable[Arrival],
        follow: Callable[[Course], Arrival | None] = lambda course: None,
    ) -> Report:
        """Play the arrivals until all is done; `follow` says what the end of a request leads to."""
        due: list[tuple[float, int, Arrival]] = []

        def expect(arrival: Arrival) -> None:
            heapq.heappush(due, (arrival.at, next(self._numbers), arrival))

        for arrival in arrivals:
            expect(arrival)
        while due or not self.scheduler.idle:
            while due and due[0][0] <= self.now:
                at, _, arrival = heapq.heappop(due)
                self.deliver(arrival.message, at)
            if self.launch() is not None:
                self.land()
            elif due:
                self.pass_time(max(0.0, due[0][0] - self.now))
            elif not self.scheduler.idle:
                raise Stuck(f"{self.scheduler.stats()}")
            while self._ended:
                if (next_one := follow(self._ended.popleft())) is not None:
                    expect(next_one)
        return self.report()

    def report(self) -> Report:
        courses = list(self.courses.values())
        ran = [course for course in courses if course.admissions]
        finished: dict[str, int] = {}
        for course in courses:
            if course.finish is not None:
                reason = course.finish.reason
                finished[reason] = finished.get(reason, 0) + 1
        return Report(
            requests=len(courses),
            finished=finished,
            steps=self.steps,
            seconds=self.now,
            prompt_tokens=sum(course.prompt_tokens for course in ran),
            cached_tokens=sum(course.cached_tokens for course in ran),
            output_tokens=sum(len(course.token_times) for course in ran),
            retractions=sum(course.retractions for course in ran),
            ttft_s=spread(course.ttft for course in courses),
            inter_token_s=spread(gap for course in courses for gap in course.gaps),
            wait_s=spread(course.wait for course in courses),
        )

    def _noted(self, messages: list[ToDetokenizer]) -> list[ToDetokenizer]:
        for message in messages:
            if isinstance(message, BatchTokenIDOut):
                for row in message.rows:
                    self._note(self.courses[row.rid], row)
        return messages

    def _note(self, course: Course, row: TokenIDOut) -> None:
        course.token_times += [self.now] * len(row.token_ids)
        course.cached_tokens = row.cached_tokens
        if row.finish is not None:
            course.finish = row.finish
            course.ended = self.now
            self._ended.append(course)
