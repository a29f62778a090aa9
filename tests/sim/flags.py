"""The flags and sizes of an episode: all drawn, borders and extremes before what is reasonable."""

from random import Random
from typing import Any

from sim.world import Setup

from tokenloom.scheduler_proc.core.lora_slots import PATIENCE
from tokenloom.wire.scheduling_config import SchedulingConfig

# Drawn where the scheduler knows them; the first value, its default, half of the time.
CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule_policy": ("fcfs", "lpm", "dfs-weight", "hrrn", "priority"),
    "low_priority_first": (False, True),
    "max_overtakes": (256, 0, 1, 5),
    "prefix_group_tokens": (64, 0, 4, 16),
    "max_skips": (16, 0, 1, 3),
    "lookahead": (16, 0, 1, 3),
    "fairness": ("none", "vtc"),
    "preemption_threshold": (None, 1, 2),
    "max_waiting_requests": (None, 1, 3, 8, 12),
    "max_waiting_tokens": (None, 20, 100),
    "queue_timeout": (None, 3.0, 20.0),
    "request_timeout": (None, 5.0, 40.0),
    "eviction_policy": ("lru", "lfu", "slru", "fifo", "priority", "cost"),
    "kv_events": (None, "inproc://events"),
}
CROWDS = 0.15  # of the episodes are crowds of adapters
_END_WAITING = (
    "max_waiting_requests",
    "max_waiting_tokens",
    "queue_timeout",
    "request_timeout",
)
_NEED_THE_TREE = ("eviction_policy", "kv_events", "schedule_policy")


def draw_setup(random: Random) -> Setup:
    """Where the scheduler may not learn from retractions, they are many."""
    learns = random.random() < 0.6
    scheduling = _scheduling(random)
    page = scheduling["page_size"]
    context = random.choice((16, 40, 64, 100, 128))
    shares = (0.3, 0.8, 1.0, 1.2, 1.7, 2.5, 4.0, 8.0) if learns else (1.0, 1.5)
    setup: Setup = {
        "scheduling": scheduling,
        "pool_pages": max(
            1, int(random.choice(shares) * context) // page + random.choice((-1, 0, 1))
        ),
        "context": context,
        "learns": learns,
        "faults": _faults(random),
        "overlap": random.random() < 0.5,
        "namespaces": random.choice((1, 1, 2)),
        "lora_slots": random.choice((1, 1, 2, 3, 8)),
        "patience": random.choice((1, 4, PATIENCE)),
    }
    if random.random() < CROWDS:
        _crowd_adapters(random, setup)
    return setup


def _crowd_adapters(random: Random, setup: Setup) -> None:
    """Many adapters stay loaded and share few slots; who waits for one waits until it has one."""
    scheduling = setup["scheduling"]
    for name in _END_WAITING:
        scheduling.pop(name, None)
    scheduling["max_running_requests"] = random.choice((3, 4, 8))
    if not scheduling["disable_radix_cache"]:
        scheduling["schedule_policy"] = random.choice(CHOICES["schedule_policy"])
    if scheduling.get("schedule_policy") == "priority":  # with urgent ones, that may preempt
        scheduling.pop("fairness", None)
        scheduling["preemption_threshold"] = random.choice((None, 1, 2))
    setup["context"] = random.choice((16, 24, 40))
    setup["pool_pages"] = random.choice((2, 4, 8)) * setup["context"] // scheduling["page_size"]
    setup["adapters"] = random.choice((3, 6, 12))
    setup["lora_slots"] = random.choice((1, 1, 2))
    setup["patience"] = random.choice((1, 1, 4, 16, PATIENCE))
    setup["crowd"] = random.choice((24, 24, 24, 24, 320))


def _faults(random: Random) -> dict[str, int] | None:
    """What goes wrong each so many times it could."""
    if random.random() < 0.8:
        return None
    every = {
        "retract_every": random.choice((0, 2, 7)),
        "miss_every": random.choice((0, 1, 3)),
        "fail_allocation_every": random.choice((0, 5, 20)),
    }
    return every if any(every.values()) else None


def _scheduling(random: Random) -> dict[str, Any]:
    page = random.choice((1, 1, 2, 4, 4, 8, 16))
    chunk = random.choice((0, page, 2 * page, page + 3, 16, 32, 64))
    drawn: dict[str, Any] = {
        "page_size": page,
        "max_running_requests": random.choice((1, 2, 3, 4, 5, 6, 8, 8)),
        "chunked_prefill_size": max(page, chunk) if chunk else 0,
        "mixed_chunk_size": random.choice((*[None] * 8, 0, 0, 1, page, 24)),
        "max_prefill_tokens": max(page, random.choice((page, 16, 48, 4096))),
        "schedule_conservativeness": random.choice((0.01, 0.01, 0.01, 0.1, 1.0, 1.3)),
        "disable_radix_cache": random.random() < 0.1,
    }
    if drawn["mixed_chunk_size"] is None and drawn["chunked_prefill_size"]:
        drawn["decode_gap_ms"] = random.choice((None, None, 0.01, 20.0, 100.0))
    for name, values in CHOICES.items():
        value = random.choice(values) if random.random() < 0.5 else values[0]
        fits = not (drawn["disable_radix_cache"] and name in _NEED_THE_TREE)
        if fits and value != values[0] and name in SchedulingConfig.__struct_fields__:
            drawn[name] = value
    return drawn
