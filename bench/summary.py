"""Records of requests, and statistics over them. PURE.

Filled in by `load` and `targets`, read by reports. Times are seconds of one monotonic clock.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

OK = "ok"
STOPPED = "stopped"  # by the harness, when the foreground streams had ended


@dataclass(slots=True, eq=False)
class Record:
    """One request; `outcome` is OK, STOPPED or the kind of the error that ended it."""

    label: str
    asked_tokens: int
    sent: float
    due: float | None = None  # scheduled time of sending, in an open loop
    text_times: list[float] = field(default_factory=list)  # arrival times of pieces with text
    ended: float = math.nan
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    outcome: str = OK

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text; NaN without text."""
        return self.text_times[0] - self.sent if self.text_times else math.nan

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces: the inter-token latencies."""
        return [after - before for before, after in pairwise(self.text_times)]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first piece; NaN if undefined.

        (completion_tokens - 1) / (last piece - first piece), the inverse of TPOT.
        """
        seconds = self.text_times[-1] - self.text_times[0] if self.text_times else 0.0
        if seconds <= 0.0 or self.completion_tokens < 2:  # all of it may come in one read
            return math.nan
        return (self.completion_tokens - 1) / seconds


class Spread(msgspec.Struct, frozen=True):
    """Distribution of a quantity; all NaN (null in JSON) without values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """Statistics of a run; rates are over `seconds`, first request sent to last answer ended."""

    requests: int  # ended, with success or not, without being stopped
    ok: int
    errors: dict[str, int]
    short_answers: int  # OK, with fewer tokens than requested
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tok_s: float
    total_tok_s: float
    ttft_ms: Spread
    inter_token_ms: Spread
    e2e_ms: Spread
    decode_tok_s: Spread  # of each single stream
    late_ms: Spread  # sent after its due time; empty in a closed loop


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate between the two closest ranks, as numpy does; NaN without values."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Iterable[float], scale: float = 1.0) -> Spread:
    """Return the distribution of the values that are not NaN."""
    ordered = sorted(value * scale for value in values if not math.isnan(value))
    if not ordered:
        return Spread(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    mean = math.fsum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(len(ordered), mean, p50, p90, p99, ordered[-1])


def summarise(records: Sequence[Record]) -> Summary:
    """Summarise records; latencies cover OK requests, gaps also stopped ones."""
    done = [record for record in records if record.outcome == OK]
    alive = [record for record in records if record.outcome in (OK, STOPPED)]
    failed = Counter(record.outcome for record in records if record not in alive)
    seconds = max((r.ended for r in records), default=0.0) - min(
        (r.sent for r in records), default=0.0
    )
    prompt = sum(record.prompt_tokens for record in done)
    output = sum(_tokens(record) for record in alive)
    return Summary(
        requests=len(done) + failed.total(),
        ok=len(done),
        errors=dict(failed.most_common()),
        short_answers=sum(record.completion_tokens < record.asked_tokens for record in done),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output,
        requests_per_s=_rate(len(done), seconds),
        output_tok_s=_rate(output, seconds),
        total_tok_s=_rate(prompt + output, seconds),
        ttft_ms=spread((record.ttft for record in done), 1e3),
        inter_token_ms=spread((gap for record in alive for gap in record.gaps), 1e3),
        e2e_ms=spread((record.ended - record.sent for record in done), 1e3),
        decode_tok_s=spread(record.decode_rate for record in done),
        late_ms=spread((r.sent - r.due for r in records if r.due is not None), 1e3),
    )


def gaps_during_prefill(reading: Sequence[Record], arriving: Sequence[Record]) -> list[float]:
    """Return gaps of `reading` that overlap the prefill of an `arriving` request."""
    windows = [(one.sent, one.text_times[0]) for one in arriving if one.text_times]
    return [
        after - before
        for record in reading
        for before, after in pairwise(record.text_times)
        if any(before < end and start < after for start, end in windows)
    ]


def _tokens(record: Record) -> int:
    """Return the tokens of a record; a stopped one has no usage, so each piece counts as one."""
    return record.completion_tokens if record.outcome == OK else len(record.text_times)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.nan
