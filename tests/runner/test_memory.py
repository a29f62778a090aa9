"""The sizing of the KV pool as a table, its error messages, and what host.py measures."""

import dataclasses
import os
import re
from pathlib import Path

import pytest

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.runner import host
from tokenloom.scheduler_proc.runner.memory import DEFAULT_CPU_BYTES, PoolNeeds, size_kv_pool

GIB = 1 << 30
NEEDS = PoolNeeds(
    bytes_per_token=1024,
    page_size=16,
    context_length=2048,
    max_running_requests=64,
    available_bytes=GIB,
    mem_fraction=0.5,
    kv_tokens=None,
)


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({}, 64 * 2048, "64 requests of 2048 tokens"),
        ({"max_running_requests": 1}, 2048, "1 requests of 2048 tokens"),
        ({"max_running_requests": 1, "context_length": 2047}, 2048, "1 requests"),
        ({"available_bytes": 10_000_000}, 4880, "--mem-fraction 0.5 of 9.5 MiB free"),
        ({"available_bytes": 10_000_000, "page_size": 1}, 4882, "--mem-fraction 0.5"),
        ({"available_bytes": 10_000_000, "mem_fraction": 0.9}, 8784, "--mem-fraction 0.9"),
        (
            {"available_bytes": 64 * GIB, "bytes_per_token": 1 << 17},
            DEFAULT_CPU_BYTES >> 17,
            "default cap of 2.0 GiB on a CPU; --kv-tokens overrides it",
        ),
        ({"kv_tokens": 100}, 96, "--kv-tokens 100"),
        ({"kv_tokens": 16}, 16, "--kv-tokens 16"),
        ({"kv_tokens": 2, "page_size": 1}, 2, "--kv-tokens 2"),
        ({"kv_tokens": 1_000_000}, 1_000_000, "--kv-tokens 1000000"),
        (
            {"kv_tokens": 1 << 15, "bytes_per_token": 1 << 17, "available_bytes": 5 * GIB},
            1 << 15,
            "4.0 GiB",
        ),
    ],
)
def test_size(changes: dict[str, float], tokens: int, reason: str) -> None:
    size = size_kv_pool(dataclasses.replace(NEEDS, **changes))
    assert size.tokens == tokens
    assert reason in size.reason
    assert f"{tokens} tokens" in size.reason


def test_a_pool_smaller_than_the_context_says_so() -> None:
    size = size_kv_pool(dataclasses.replace(NEEDS, kv_tokens=512))
    assert "a request can use 512 of the model's 2048 tokens" in size.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_tokens": 15}, "--kv-tokens 15 is too small: it must be at least 16"),
        ({"kv_tokens": 1, "page_size": 1}, "must be at least 2 with --page-size 1"),
        ({"kv_tokens": 1 << 21}, r"needs 2.0 GiB, but 1.0 GiB are free: at most 1048560 tokens"),
        ({"available_bytes": 600 * 1024}, "raise --mem-fraction to 0.86 or set --kv-tokens"),
        ({"available_bytes": 500 * 1024}, "free some memory, take a smaller model"),
        ({"available_bytes": 0}, "free some memory"),
        ({"available_bytes": 99 * GIB, "bytes_per_token": 8 << 20}, "set --kv-tokens to 512"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_value_that_works(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        size_kv_pool(dataclasses.replace(NEEDS, **changes))


@pytest.mark.parametrize("available", [520 * 1024, 600 * 1024, 777 * 1024, 1000 * 1024])
def test_the_named_mem_fraction_works_and_a_smaller_one_does_not(available: int) -> None:
    needs = dataclasses.replace(NEEDS, available_bytes=available, mem_fraction=0.1)
    with pytest.raises(ModelError) as refusal:
        size_kv_pool(needs)
    named = re.search(r"--mem-fraction to (\d\.\d\d)", str(refusal.value))
    assert named is not None
    fraction = float(named[1])
    assert size_kv_pool(dataclasses.replace(needs, mem_fraction=fraction)).tokens >= 512
    with pytest.raises(ModelError):
        size_kv_pool(dataclasses.replace(needs, mem_fraction=fraction - 0.01))


def test_the_largest_named_kv_tokens_fits() -> None:
    fits = dataclasses.replace(NEEDS, kv_tokens=1048560)
    assert size_kv_pool(fits).tokens == 1048560
    with pytest.raises(ModelError):
        size_kv_pool(dataclasses.replace(fits, kv_tokens=1048560 + 16))


@pytest.mark.parametrize(
    ("limit_name", "usage_name", "stat"),
    [
        ("memory.max", "memory.current", "inactive_file 500"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file 500"),
    ],
)
def test_a_cgroup_limit_lowers_the_available_memory(
    tmp_path: Path, limit_name: str, usage_name: str, stat: str
) -> None:
    for root in (tmp_path, tmp_path / "memory"):  # where version 2 and version 1 look
        root.mkdir(exist_ok=True)
        (root / limit_name).write_text("10000\n")
        (root / usage_name).write_text("4000\n")
        (root / "memory.stat").write_text(f"anon 1\n{stat}\n")
    expected = 10000 - 4000 + 500
    assert host.available_memory(tmp_path) == expected


def test_an_unlimited_cgroup_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert host.available_memory(tmp_path) > 1 << 20


def test_threads_are_pinned_only_where_each_core_gets_one() -> None:
    cores = host.physical_cores()
    pinned = host.cores_to_pin(cores)
    if hasattr(os, "sched_getaffinity"):
        assert len(set(pinned)) == cores
        assert set(pinned) <= os.sched_getaffinity(0)
    assert host.cores_to_pin(cores + 1) == host.cores_to_pin(cores - 1) == []


def test_physical_cores_are_those_this_process_may_use() -> None:
    assert 1 <= host.physical_cores() <= (os.cpu_count() or 1)
