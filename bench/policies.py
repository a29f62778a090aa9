"""Effect of the scheduler's flags on simulated crowds: `python -m tokenloom.bench.policies`.

Plays workloads through the real scheduler in logical time (`simulation`) and prints the tables of
docs/scheduling.md. Nothing is timed, so every machine prints the same.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count, product
from typing import Literal, get_args

import msgspec

from ..scheduler_proc.core.intake import Limits
from ..scheduler_proc.core.scheduler import Scheduler
from ..wire.device_defaults import DEFAULTS
from ..wire.sampling import SamplingParams
from ..wire.scheduling_config import SchedulePolicy, SchedulingConfig
from .policy_workloads import (
    ADMISSION_WORKLOADS,
    BUDGET_WORKLOADS,
    COLD,
    FLOODED,
    POLICY_WORKLOADS,
    STEADY,
    Ask,
    alone,
    flood,
    starvation,
)
from .simulation.driver import Arrival, Course, Driver, request
from .simulation.hash_model import EOS, VOCAB, HashRunner
from .simulation.step_time import StepTime
from .summary import Spread, spread

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
FAIRNESS: tuple[Literal["none", "vtc"], ...] = ("none", "vtc")
BUDGETS: dict[str, dict[str, int]] = {
    "`--mixed-chunk-size 64`": {"mixed_chunk_size": 64},
    "the default goal": {},
    "`--decode-gap-ms 25`": {"decode_gap_ms": 25},
}
CARE = (0.5, 1.0, 1.4)
UNBOUNDED = 1 << 30
URGENT = 5  # every fifth request of the first study
POOL_TOKENS, SMALL_POOL_TOKENS, CONTEXT = 24_576, 8_192, 8_192
LARGE_POOL_TOKENS = 262_144
CPU = StepTime()
GPU = StepTime(step=8e-3, row=0.01e-3, token=0.03e-3, context_token=3e-8)  # like an 8B model's


def play(
    asks: Iterable[Ask],
    settings: SchedulingConfig,
    *,
    pool_tokens: int = POOL_TOKENS,
    urgent: int = 0,
    step_time: StepTime = CPU,
) -> Driver:
    """Play all requests and their later turns to the end; every `urgent`-th has priority 1."""
    page = settings.page_size
    runner = HashRunner(
        num_pages=pool_tokens // page + 1,
        page_size=page,
        num_rows=settings.max_running_requests,
        budget=min(settings.chunked_prefill_size, settings.max_prefill_tokens),
    )
    limits = Limits(VOCAB, CONTEXT, pool_tokens, frozenset({EOS}))
    scheduler = Scheduler(settings, limits, pool_tokens // page + 1)
    driver = Driver(scheduler, runner, step_time)
    rids, asked = count(1), dict[int, Ask]()

    def arrival(ask: Ask, at: float) -> Arrival:
        rid = next(rids)
        asked[rid] = ask
        runner.scripts[rid] = ask.script
        params = SamplingParams(max_new_tokens=ask.limit)
        rank = int(urgent > 0 and rid % urgent == 0)
        message = request(rid, ask.prompt, params, priority=rank, tenant=ask.tenant)
        return Arrival(at, message)

    def next_turn(course: Course) -> Arrival | None:
        turn = asked[course.rid].then
        return None if turn is None else arrival(turn, course.ended + turn.at)

    driver.run([arrival(ask, ask.at) for ask in asks], next_turn)
    scheduler.check()
    return driver


def overtakes(driver: Driver, rids: Iterable[int]) -> int:
    """Return the most later arrivals admitted before any of `rids`, which are in arrival order."""
    place = {rid: index for index, rid in reversed(list(enumerate(driver.starts)))}
    return max(sum(other > rid for other in driver.starts[: place[rid]]) for rid in rids)


def of(driver: Driver, tenant: str) -> list[Course]:
    return [course for course in driver.courses.values() if course.tenant == tenant]


def ttft(courses: Iterable[Course]) -> Spread:
    return spread(course.ttft for course in courses)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        cells = (f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        print("| " + " | ".join(cells) + " |", flush=True)
    print()


def policies(scale: float) -> None:
    """Each policy on four workloads."""

    def rows() -> Iterable[Sequence[object]]:
        for name, workload in POLICY_WORKLOADS.items():
            for policy in POLICIES:
                settings = SchedulingConfig(schedule_policy=policy)
                driver = play(workload(scale), settings, urgent=URGENT)
                report, first = driver.report(), driver.report().ttft_s
                urgent = ttft(course for rid, course in driver.courses.items() if rid % URGENT == 0)
                rate, hits = f"{report.output_tok_s:.0f}", f"{report.hit_rate:.0%}"
                waits = report.wait_s.max
                yield name, f"`{policy}`", rate, hits, first.p50, first.p99, urgent.p99, waits

    head = ("workload", "policy", "tok/s", "hits", "TTFT p50", "p99", "p99 of the urgent")
    table((*head, "worst wait"), rows())


def cold_requests(scale: float) -> None:
    """Ten cold requests beside a stream that the policy prefers."""

    def rows() -> Iterable[Sequence[object]]:
        cases = [(POLICIES[0], 256), *((POLICIES[1], bound) for bound in (16, 256, UNBOUNDED))]
        for policy, bound in cases:
            settings = SchedulingConfig(schedule_policy=policy, max_overtakes=bound)
            driver = play(starvation(scale), settings)
            cold = of(driver, COLD)
            overtaken = overtakes(driver, [course.rid for course in cold])
            waits = spread(course.wait for course in cold)
            report = driver.report()
            said = bound if bound < UNBOUNDED else "no bound"
            rate = f"{report.output_tok_s:.0f}"
            yield f"`{policy}`", said, overtaken, waits.p50, waits.max, report.ttft_s.p99, rate

    head = ("policy", "`--max-overtakes`", "most overtakes", "wait p50", "worst wait")
    table((*head, "TTFT p99 of all", "tok/s"), rows())


def flooding_tenant(scale: float) -> None:
    """One request a second of one tenant beside the flood of another."""

    def rows() -> Iterable[Sequence[object]]:
        calm = play(alone(scale), SchedulingConfig())
        first = ttft(calm.courses.values())
        yield "no flood", "", first.p50, first.p99, first.max, "", ""
        for policy, fairness in product(POLICIES[:2], FAIRNESS):
            settings = SchedulingConfig(schedule_policy=policy, fairness=fairness)
            driver = play(flood(scale), settings)
            first, flooded = ttft(of(driver, STEADY)), ttft(of(driver, FLOODED)).p50
            rate, names = f"{driver.report().output_tok_s:.0f}", (f"`{policy}`", f"`{fairness}`")
            yield *names, first.p50, first.p99, first.max, flooded, rate

    head = ("policy", "`--fairness`", "TTFT p50", "p99", "worst", "p50 of the flood")
    table((*head, "tok/s"), rows())


def admission(scale: float) -> None:
    """Answers of several kinds in a pool too small for all rows."""

    def rows() -> Iterable[Sequence[object]]:
        for name, workload in ADMISSION_WORKLOADS.items():
            for care in CARE:
                settings = SchedulingConfig(schedule_conservativeness=care)
                driver = play(workload(scale), settings, pool_tokens=SMALL_POOL_TOKENS)
                report = driver.report()
                gaps, first = report.inter_token_s, report.ttft_s
                rate = f"{report.output_tok_s:.0f}"
                yield name, care, rate, report.retractions, first.p50, first.p99, gaps.max

    head = ("answers", "`--schedule-conservativeness`", "tok/s", "retractions", "TTFT p50", "p99")
    table((*head, "longest gap"), rows())


def most_at_once(driver: Driver) -> int:
    """Return the most requests between their first and last token at a time."""
    ends = [(course.token_times[0], 1) for course in driver.courses.values()]
    ends += [(course.token_times[-1], -1) for course in driver.courses.values()]
    return max(accumulate(change for _, change in sorted(ends)))


def step_budget(scale: float) -> None:
    """Compare limits for steps that also decode: a token count or a time goal."""

    def rows() -> Iterable[Sequence[object]]:
        for (crowd, workload), device in product(BUDGET_WORKLOADS.items(), ("cuda", "cpu")):
            for name, flag in BUDGETS.items():
                settings = msgspec.structs.replace(DEFAULTS[device], **flag)
                time = GPU if device == "cuda" else CPU
                driver = play(
                    workload(scale), settings, pool_tokens=LARGE_POOL_TOKENS, step_time=time
                )
                report = driver.report()
                first, gaps = report.ttft_s, report.inter_token_s
                rate, most = f"{report.output_tok_s:.0f}", most_at_once(driver)
                shown = (first.p50, first.p99, f"{1e3 * gaps.p50:.0f}", f"{1e3 * gaps.p99:.0f}")
                yield crowd, device, name, rate, most, *shown

    head = ("prompts", "device", "steps filled by", "tok/s", "most at once", "TTFT p50", "p99")
    table((*head, "gap p50 in ms", "p99"), rows())


STUDIES: dict[str, Callable[[float], None]] = {
    "policies": policies,
    "starvation": cold_requests,
    "flood": flooding_tenant,
    "admission": admission,
    "budget": step_budget,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the scheduler's flags do, in logical time.")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--scale", type=float, default=1.0, help="of the crowds (default: 1)")
    flags = parser.parse_args(argv)
    for name in flags.studies or STUDIES:
        print(f"{name}: {STUDIES[name].__doc__} Times in seconds.\n")
        STUDIES[name](flags.scale)


if __name__ == "__main__":
    main()
