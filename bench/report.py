"""Format results as tables and JSON; measures and prints nothing."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from .load import Run
from .summary import Spread, Summary, spread, summarise


class SelfMeasured(msgspec.Struct, frozen=True):
    """Cost of the load generator and the error of its times."""

    cpu_share: float  # of one core
    lag_ms: Spread  # from bytes ready to seen


class Result(msgspec.Struct, frozen=True):
    """One run of a workload; `by_label` splits it by kind of request if there are several."""

    total: Summary
    by_label: dict[str, Summary]
    messages: dict[str, str]
    harness: SelfMeasured


def result_of(run: Run) -> Result:
    labels = dict.fromkeys(record.label for record in run.records)
    parts = {label: summarise([r for r in run.records if r.label == label]) for label in labels}
    return Result(
        total=summarise(run.records),
        by_label=parts if len(parts) > 1 else {},
        messages=run.messages,
        harness=SelfMeasured(run.cpu_share, spread(run.lag, 1e3)),
    )


def as_json(value: Any) -> bytes:  # noqa: ANN401  (any msgspec value)
    """Encode with indentation; NaN becomes null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def show(result: Result, title: str) -> str:
    """Format a result as text, with a table of latencies for each kind of request."""
    parts = result.by_label or {"": result.total}
    blocks = [title, _totals(result.total)]
    blocks += [_latencies(label, summary) for label, summary in parts.items()]
    blocks += [_errors(result)] if result.total.errors else []
    blocks.append(_harness(result))
    return "\n\n".join(blocks)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def number(value: float) -> str:
    """Format about three digits; `-` for NaN."""
    if math.isnan(value):
        return "-"
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def _totals(total: Summary) -> str:
    lines = [
        f"{total.ok} of {total.requests} requests answered in {total.seconds:.2f} s"
        f" ({number(total.requests_per_s)} a second)",
        f"output {number(total.output_tok_s)} tok/s,"
        f" with prompts {number(total.total_tok_s)} tok/s",
        f"{total.prompt_tokens} prompt tokens, {total.cached_tokens} of them cached;"
        f" {total.output_tokens} output tokens",
    ]
    if total.short_answers:
        lines.append(f"{total.short_answers} answers were shorter than asked for")
    return "\n".join(lines)


def _latencies(label: str, summary: Summary) -> str:
    kinds = {
        "time to first token, ms": summary.ttft_ms,
        "inter-token, ms": summary.inter_token_ms,
        "whole request, ms": summary.e2e_ms,
        "decode of one stream, tok/s": summary.decode_tok_s,
    }
    if summary.late_ms.count:
        kinds["sent after due time, ms"] = summary.late_ms
    header = [label, "mean", "p50", "p90", "p99", "max"]
    rows = [[name, *map(number, (s.mean, s.p50, s.p90, s.p99, s.max))] for name, s in kinds.items()]
    return table(header, rows)


def _errors(result: Result) -> str:
    rows = [
        f"{count} x {kind}: {result.messages.get(kind, '')}".rstrip(": ")
        for kind, count in result.total.errors.items()
    ]
    return "\n".join(["errors", *rows])


def _harness(result: Result) -> str:
    lag = result.harness.lag_ms
    return (
        f"the harness: {result.harness.cpu_share:.0%} of a core, data noticed after"
        f" {number(lag.p50)} ms (p50), {number(lag.p99)} ms (p99), {number(lag.max)} ms (max)"
    )
