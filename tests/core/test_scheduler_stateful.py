"""The whole scheduler under random clients, with every law checked after every event.

Random prompts over shared prefixes, lengths around page, chunk, pool and context borders, aborts,
stop matches before, between, during steps, time limits, priorities that preempt, and faults: forced
retractions and misses, allocations that fail. In the end every answer equals the request alone.
"""

from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.hash_model import VOCAB
from support.kv_replica import Replica, in_tree
from support.scheduling import Bench

from tokenloom.scheduler_proc.core.faults import Faults
from tokenloom.wire.messages import AbortReq, DrainReq, FlushReq, StopMatched, ToScheduler
from tokenloom.wire.scheduling_config import EvictionPolicy

PREFIXES = [[], [1] * 16, [2, 3] * 20, list(range(1, 70)), list(range(1, 34)) + [7] * 30]

RARE = st.integers(2, 12)
FAULTS = st.one_of(
    st.builds(Faults),
    st.builds(Faults, retract_every=RARE),
    st.builds(Faults, miss_every=RARE),
    st.builds(Faults, fail_allocation_every=RARE),
    st.builds(Faults, retract_every=RARE, miss_every=RARE, fail_allocation_every=RARE),
)


class SchedulerUnderClients(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pool=st.sampled_from([64, 128, 256, 512]),
        chunk=st.sampled_from([0, 16, 32]),
        mixed_chunk=st.sampled_from([0, 16]),
        max_running=st.integers(1, 6),
        reuse=st.booleans(),
        ratio=st.sampled_from([0.01, 1.0]),
        schedule_policy=st.sampled_from(["fcfs", "lpm", "dfs-weight", "hrrn", "priority"]),
        low_priority_first=st.booleans(),
        max_overtakes=st.sampled_from([0, 1, 3, 256]),
        prefix_group_tokens=st.sampled_from([0, 1, 16, 64]),
        max_skips=st.sampled_from([0, 1, 4]),
        lookahead=st.sampled_from([0, 1, 8]),
        fairness=st.sampled_from(["none", "vtc"]),
        vtc_output_weight=st.sampled_from([0.5, 2.0]),
        limits=st.fixed_dictionaries(
            {},
            optional={
                "preemption_threshold": st.integers(1, 2),
                "max_waiting_requests": st.integers(1, 4),
                "max_waiting_tokens": st.integers(1, 200),
                "queue_timeout": st.floats(0.5, 20.0),
                "request_timeout": st.floats(0.5, 60.0),
            },
        ),
        faults=FAULTS,
        eviction=st.sampled_from(get_args(EvictionPolicy)),
        events=st.booleans(),
        overlap=st.booleans(),
    )
    def start(self, limits: dict[str, object], **options: object) -> None:
        options["pool_tokens"] = options.pop("pool")
        if options["schedule_policy"] in ("lpm", "dfs-weight"):
            options["reuse"] = True
        self.bench = Bench(**options, **limits)  # type: ignore[arg-type]
        self.events = options["events"] and options["reuse"]
        self.draining = False
        self.flushes = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20),
        max_new=st.one_of(st.none(), st.integers(1, 60)),
        options=st.fixed_dictionaries(
            {
                "ignore_eos": st.booleans(),
                "tenant": st.sampled_from(["", "b"]),
                "priority": st.integers(-1, 2),
                "namespace": st.sampled_from(["", "a"]),
            }
        ),
    )
    def submit(
        self, prefix: list[int], tail: list[int], max_new: int | None, options: dict[str, object]
    ) -> None:
        self.bench.submit(prefix + tail, max_new, **options)  # type: ignore[arg-type]

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.bench.step()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data(), stop=st.booleans())
    def step_with_an_end_in_flight(self, data: st.DataObject, stop: bool) -> None:
        self.bench.step(meanwhile=[self.end(data, stop)])

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data(), stop=st.booleans())
    def end_between_steps(self, data: st.DataObject, stop: bool) -> None:
        self.bench.send(self.end(data, stop))

    def end(self, data: st.DataObject, stop: bool) -> ToScheduler:
        rid = data.draw(st.integers(1, len(self.bench.requests) + 1))
        return StopMatched(rid) if stop else AbortReq(rid)

    @precondition(lambda self: not self.draining and len(self.bench.requests) > 8)
    @rule()
    def drain(self) -> None:
        self.draining = True
        self.bench.send(DrainReq())

    @rule(timeout=st.sampled_from([0.0, 1.0]))
    def flush(self, timeout: float) -> None:
        self.flushes += 1
        self.bench.send(FlushReq(self.flushes, timeout))

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.wait(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.run()
        if self.events:
            replica = Replica(bench.scheduler._kv.page_size)
            replica.apply(bench.scheduler.take_kv_events())
            assert replica.prefixes == in_tree(bench)
        assert set(bench.finishes) == set(bench.requests), "each request ends exactly once"
        assert bench.drained == self.draining
        seqs = sorted(answer.seq for answer in bench.flushed)
        assert seqs == list(range(1, self.flushes + 1)), "each flush is answered exactly once"
        for rid, finish in bench.finishes.items():
            got = bench.answers.get(rid, [])
            if finish.reason == "length" or finish.matched is not None:
                assert got == bench.expected(rid)
            elif finish.status != 400:
                assert got == bench.expected(rid)[: len(got)]
            assert 0 <= bench.cached[rid] < max(1, len(bench.requests[rid].input_ids) // 4)
        bench.assert_clean()
        queue = bench.scheduler._waiting
        assert not queue._lines, "a line without requests is kept"
        if queue._index is not None:
            assert not queue._index._spots
            assert not queue._index._bucket_of
            assert not any(bucket.reqs for bucket in queue._index._stale)
        if queue._counters is not None:
            assert len(queue._counters) <= 3
            assert not queue._counters._waiting
            assert not queue._counters._requests


TestSchedulerUnderClients = SchedulerUnderClients.TestCase
TestSchedulerUnderClients.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
