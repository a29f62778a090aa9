"""Sizes of steps that nobody gave are those of the device, and what was given stays."""

import pytest

from tokenloom.wire.device_defaults import resolve_scheduling, step_sizes
from tokenloom.wire.scheduling_config import SchedulingConfig, SchedulingFlags


def sizes(config: SchedulingConfig) -> tuple[int, int, int]:
    return config.max_running_requests, config.max_prefill_tokens, config.chunked_prefill_size


def test_a_cuda_device_has_more_rows_and_larger_chunks() -> None:
    assert sizes(resolve_scheduling(SchedulingFlags(), "cpu")) == (64, 4096, 512)
    assert sizes(resolve_scheduling(SchedulingFlags(), "cuda")) == (256, 8192, 8192)


@pytest.mark.parametrize(
    ("given", "cpu", "cuda"),
    [
        ({"max_running_requests": 7}, (7, 4096, 512), (7, 8192, 8192)),
        ({"chunked_prefill_size": 100}, (64, 4096, 100), (256, 8192, 100)),
        ({"chunked_prefill_size": 0}, (64, 4096, 0), (256, 8192, 0)),
        ({"chunked_prefill_size": 16384}, (64, 16384, 16384), (256, 16384, 16384)),
        ({"max_prefill_tokens": 300}, (64, 300, 512), (256, 300, 8192)),
    ],
)
def test_what_is_given_stays(
    given: dict[str, int], cpu: tuple[int, int, int], cuda: tuple[int, int, int]
) -> None:
    flags = SchedulingFlags(**given)  # type: ignore[arg-type]
    assert sizes(resolve_scheduling(flags, "cpu")) == cpu
    assert sizes(resolve_scheduling(flags, "cuda")) == cuda


def test_all_other_flags_are_taken_over() -> None:
    flags = SchedulingFlags(page_size=4, decode_gap_ms=12.5, queue_timeout=3.0, fairness="vtc")
    config = resolve_scheduling(flags, "cpu")
    assert config == SchedulingConfig(
        page_size=4, decode_gap_ms=12.5, queue_timeout=3.0, fairness="vtc"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            "64 requests and 512 prompt tokens, longer prompts are cut; beside decodes: what",
        ),
        ({"decode_gap_ms": 25.0}, "what fits 25 ms (--decode-gap-ms)"),
        ({"mixed_chunk_size": 64}, "64 tokens (--mixed-chunk-size)"),
        ({"mixed_chunk_size": 0}, "no bound of its own"),
        ({"chunked_prefill_size": 0}, "4096 prompt tokens, longer prompts are not cut"),
    ],
)
def test_the_log_says_what_a_step_computes(settings: dict[str, object], words: str) -> None:
    assert words in step_sizes(SchedulingConfig(**settings))  # type: ignore[arg-type]
