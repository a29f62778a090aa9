"""The config crosses to the children as JSON and comes back equal; wrong values are refused."""

from typing import get_type_hints

import msgspec
import pytest

from tokenloom.wire.config import (
    DetokenizerConfig,
    ExecutionConfig,
    FrontConfig,
    Links,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenloom.wire.door_config import DoorConfig
from tokenloom.wire.lora_config import LoRAConfig, read_lora
from tokenloom.wire.scheduling_config import SchedulingConfig, SchedulingFlags, contradiction

MODEL = ModelConfig(model="/models/tiny", context_length=256, load_format="dummy")
LINKS = Links("/run/x")

CONFIGS = [
    ServerConfig(),
    ServerConfig(model=MODEL, runtime=RuntimeConfig(log_level="debug", drain_timeout=0.0)),
    FrontConfig(
        model=MODEL,
        doors=DoorConfig(port=0, socket="tcp://:31000"),
        log_level="info",
        links=LINKS,
    ),
    SchedulerConfig(
        model=MODEL,
        scheduling=SchedulingFlags(page_size=1, chunked_prefill_size=0),
        execution=ExecutionConfig(kv_tokens=512, cpu_threads=2),
        log_level="info",
        links=LINKS,
        lora=LoRAConfig(lora=("a=/x",), lora_root=("/y",), max_lora_rank=8),
    ),
    DetokenizerConfig(model=MODEL, log_level="info", links=LINKS),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_config_comes_back_equal(config: msgspec.Struct) -> None:
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (DoorConfig, "port", 65536),
        (DoorConfig, "port", -1),
        (DoorConfig, "max_queued_requests", 0),
        (DoorConfig, "max_body_bytes", 1023),
        (ModelConfig, "context_length", 1),
        (ModelConfig, "load_format", "pickle"),
        (SchedulingConfig, "max_running_requests", 0),
        (SchedulingConfig, "max_running_requests", 4097),
        (SchedulingConfig, "max_prefill_tokens", 0),
        (SchedulingConfig, "chunked_prefill_size", -1),
        (SchedulingFlags, "max_running_requests", 0),
        (SchedulingFlags, "max_running_requests", 4097),
        (SchedulingFlags, "max_prefill_tokens", 0),
        (SchedulingFlags, "chunked_prefill_size", -1),
        (SchedulingFlags, "mixed_chunk_size", -1),
        (SchedulingFlags, "decode_gap_ms", 0.0),
        (SchedulingFlags, "decode_gap_ms", 60_001.0),
        (SchedulingConfig, "page_size", 0),
        (SchedulingConfig, "schedule_policy", "random"),
        (SchedulingConfig, "max_overtakes", -1),
        (SchedulingConfig, "prefix_group_tokens", -1),
        (SchedulingConfig, "max_skips", -1),
        (SchedulingConfig, "lookahead", -1),
        (SchedulingConfig, "fairness", "fair"),
        (SchedulingConfig, "vtc_output_weight", 0.0),
        (SchedulingConfig, "page_size", 257),
        (SchedulingConfig, "schedule_conservativeness", 0.0),
        (SchedulingConfig, "eviction_policy", "mru"),
        (SchedulingConfig, "preemption_threshold", 0),
        (SchedulingConfig, "max_waiting_requests", 0),
        (SchedulingConfig, "max_waiting_tokens", 0),
        (SchedulingConfig, "queue_timeout", 0.0),
        (SchedulingConfig, "request_timeout", 0.0),
        (ExecutionConfig, "kv_tokens", 0),
        (ExecutionConfig, "mem_fraction", 0.0),
        (ExecutionConfig, "mem_fraction", 1.0),
        (ExecutionConfig, "cpu_threads", 0),
        (ExecutionConfig, "device", "cuda:9"),
        (LoRAConfig, "lora", ["a b=/x"]),
        (LoRAConfig, "max_loras_per_batch", 0),
        (LoRAConfig, "max_lora_rank", 1025),
        (LoRAConfig, "max_loaded_loras", 0),
        (RuntimeConfig, "start_timeout", 0.0),
        (RuntimeConfig, "log_level", "verbose"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(
    kind: type[msgspec.Struct], field: str, value: object
) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, kind)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"page_size": 64, "chunked_prefill_size": 63}, "--chunked-prefill-size 63"),
        ({"page_size": 64, "max_prefill_tokens": 63}, "--max-prefill-tokens 63"),
        ({"decode_gap_ms": 5.0, "mixed_chunk_size": 0}, "--decode-gap-ms 5"),
        ({"decode_gap_ms": 0.5, "chunked_prefill_size": 0}, "--decode-gap-ms 0.5"),
        ({"kv_events_replay": "tcp://*:2"}, "--kv-events-replay"),
        ({"kv_events": "tcp://*:1", "disable_radix_cache": True}, "--kv-events"),
        ({"eviction_policy": "lfu", "disable_radix_cache": True}, "--eviction-policy lfu"),
    ],
)
def test_flags_that_contradict_each_other(settings: dict[str, object], names: str) -> None:
    assert contradiction(SchedulingConfig()) is None
    problem = contradiction(SchedulingConfig(**settings))  # type: ignore[arg-type]
    assert problem is not None
    assert names in problem


def test_the_links_are_four_different_sockets_in_the_run_directory() -> None:
    links = {LINKS.launcher, LINKS.scheduler, LINKS.detokenizer, LINKS.front}
    assert len(links) == 4
    assert all(link.startswith("ipc:///run/x/") for link in links)


def test_every_field_has_a_help_text() -> None:
    for kind in get_type_hints(ServerConfig).values():
        schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
        for name, field in schema["properties"].items():
            assert field.get("description"), name


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("a=/x", ("a", "/x", False)),
        ("a=/x,pinned", ("a", "/x", True)),
        ("a=/x=y,pinned,pinned", ("a", "/x=y,pinned", True)),
    ],
)
def test_the_parts_of_an_adapter_flag(flag: str, parts: tuple[str, str, bool]) -> None:
    assert read_lora(flag) == parts


def test_adapters_are_off_until_a_flag_names_some() -> None:
    assert not LoRAConfig().enabled
    assert LoRAConfig(lora=("a=/x",)).enabled
    assert LoRAConfig(lora_root=("/y",)).enabled
