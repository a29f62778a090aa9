"""Workloads on which engines are compared, and the metrics of each.

Values only: `peers` runs them. Every repetition has its own seed, so each starts with a cold prefix
cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .summary import OK, Record, Summary, gaps_during_prefill, spread, summarise
from .workloads import (
    Closed,
    Shape,
    Source,
    Stream,
    Workload,
    chats,
    even,
    independent,
    long_prompts,
    shared_prefix,
)

ARRIVALS = 6  # long prompts of workload e
ARRIVAL_SECONDS = 4.0
FASTEST_STREAM = 500  # tokens a second, for the length of its decode streams

Numbers = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """A number of a case: its key, and whether more is better."""

    key: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class Case:
    """Workloads run one after the other, and `measure` over their records; first metric leads."""

    name: str
    about: str
    parts: Callable[[Source], tuple[Workload, ...]]
    measure: Callable[[Sequence[Sequence[Record]]], Numbers]
    metrics: tuple[Metric, ...]


_OUTPUT = Metric("output", "tok/s", True)
_TTFT = Metric("ttft p50", "ms", False)
_TTFT_P99 = Metric("ttft p99", "ms", False)
_ITL = Metric("itl p50", "ms", False)
_ITL_P99 = Metric("itl p99", "ms", False)
_THROUGHPUT = (_OUTPUT, _TTFT, _TTFT_P99, _ITL, _ITL_P99)


def _throughput(records: Sequence[Sequence[Record]]) -> Numbers:
    return _numbers(summarise(records[0]))


def _numbers(summary: Summary) -> Numbers:
    return {
        "output": summary.output_tok_s,
        "ttft p50": summary.ttft_ms.p50,
        "ttft p99": summary.ttft_ms.p99,
        "itl p50": summary.inter_token_ms.p50,
        "itl p99": summary.inter_token_ms.p99,
        "cached": summary.cached_tokens / max(summary.prompt_tokens, 1),
    }


def _single(records: Sequence[Sequence[Record]]) -> Numbers:
    summary = summarise(records[0])
    return {"decode": summary.decode_tok_s.p50, **_numbers(summary)}


def _prefill(records: Sequence[Sequence[Record]]) -> Numbers:
    rates = [record.prompt_tokens / record.ttft for record in records[0] if record.outcome == OK]
    return {"prefill": spread(rates).p50, "ttft p50": summarise(records[0]).ttft_ms.p50}


def _under_arrivals(records: Sequence[Sequence[Record]]) -> Numbers:
    alone, mixed = records
    reading = [record for record in mixed if record.label == "decode"]
    arriving = [record for record in mixed if record.label == "long"]
    before = summarise(alone).inter_token_ms.p99
    during = summarise(reading).inter_token_ms.p99
    return {
        "itl p99": during,
        "itl p99 alone": before,
        "times alone": during / before if before > 0 else math.nan,
        "itl p99 in prefill": spread(gaps_during_prefill(reading, arriving), 1e3).p99,
        "itl max": summarise(reading).inter_token_ms.max,
        "long ttft p50": summarise(arriving).ttft_ms.p50,
    }


def _requests(
    count: int, prompt: int, answer: int, in_flight: int
) -> Callable[[Source], tuple[Workload, ...]]:
    def parts(source: Source) -> tuple[Workload, ...]:
        sessions = independent(source, count, Shape(prompt, answer))
        return ((Stream("requests", sessions, Closed(in_flight)),),)

    return parts


def _shared(source: Source) -> tuple[Workload, ...]:
    sessions = shared_prefix(source, 32, Shape(32, 32), prefix=1024, groups=1)
    return ((Stream("requests", sessions, Closed(8)),),)


def _chats(source: Source) -> tuple[Workload, ...]:
    return ((Stream("turns", chats(source, 8, Shape(96, 64), turns=4), Closed(8)),),)


def _arrivals(source: Source) -> tuple[Workload, ...]:
    alone = Stream("decode", independent(source, 8, Shape(128, 256), "alone"), Closed(8))
    each = math.ceil((ARRIVALS + 3) * ARRIVAL_SECONDS * FASTEST_STREAM / 512)
    steady = Stream("decode", independent(source, 8 * each, Shape(128, 512)), Closed(8))
    # The first arrival finds all eight streams decoding.
    arrivals = even(ARRIVAL_SECONDS, ARRIVALS, start=ARRIVAL_SECONDS)
    return ((alone,), long_prompts(source, steady, arrivals, Shape(1500, 16)))


WARMUP = _requests(16, 128, 16, in_flight=8)

CASES = (
    Case(
        "a",
        "1 stream, 128 tokens in, 128 out",
        _requests(4, 128, 128, in_flight=1),
        _single,
        (Metric("decode", "tok/s", True), _TTFT, _ITL, _ITL_P99),
    ),
    Case(
        "b8",
        "64 requests, 8 in flight, 128 in, 64 out",
        _requests(64, 128, 64, in_flight=8),
        _throughput,
        _THROUGHPUT,
    ),
    Case(
        "b32",
        "64 requests, 32 in flight, 128 in, 64 out",
        _requests(64, 128, 64, in_flight=32),
        _throughput,
        _THROUGHPUT,
    ),
    Case(
        "c",
        "32 requests, 1,024 tokens in common and 32 own, 32 out, 8 in flight, cold cache",
        _shared,
        _throughput,
        (*_THROUGHPUT, Metric("cached", "share", True)),
    ),
    Case(
        "d",
        "8 chats of 4 turns, 96 tokens a turn, 64 out",
        _chats,
        _throughput,
        (*_THROUGHPUT, Metric("cached", "share", True)),
    ),
    Case(
        "e",
        f"8 streams decoding, a prompt of 1,500 tokens every {ARRIVAL_SECONDS:.0f} s",
        _arrivals,
        _under_arrivals,
        (
            _ITL_P99,
            Metric("itl p99 alone", "ms", False),
            Metric("times alone", "x", False),
            Metric("itl p99 in prefill", "ms", False),
            Metric("itl max", "ms", False),
            Metric("long ttft p50", "ms", False),
        ),
    ),
    Case(
        "prefill",
        "8 prompts of 512 tokens, one at a time, to the first token",
        _requests(8, 512, 4, in_flight=1),
        _prefill,
        (Metric("prefill", "tok/s", True), _TTFT),
    ),
)
