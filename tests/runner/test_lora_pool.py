"""LoRAMemoryPool: loads in a thread, what slots refer to, and loads that break."""

import logging
from pathlib import Path
from threading import Event

import pytest

from tokenloom.model_files.errors import AdapterError
from tokenloom.scheduler_proc.models.lora import LoRAAdapter
from tokenloom.scheduler_proc.runner.lora_pool import LoRAMemoryPool
from tokenloom.scheduler_proc.worker_batch import LoRAOrders
from tokenloom.wire.messages import LoRALoaded, LoRARef


class Reader:
    """Reads any path at once, but `slow` when told to go on; some cannot be read."""

    def __init__(self) -> None:
        self.go_on = Event()
        self.made: dict[str, LoRAAdapter] = {}

    def __call__(self, path: Path) -> LoRAAdapter:
        if path.name == "wrong":
            raise AdapterError("target_modules name no module")
        if path.name == "broken":
            raise RuntimeError("a bug")
        if path.name == "slow":
            assert self.go_on.wait(30)
        self.made[path.name] = LoRAAdapter({}, 4)
        return self.made[path.name]


def ref(lora_id: int, path: str) -> LoRARef:
    return LoRARef(lora_id, f"a{lora_id}", path)


def load(pool: LoRAMemoryPool, *refs: LoRARef) -> list[LoRALoaded]:
    """All answers, once the thread has given them."""
    pool.follow(LoRAOrders(list(refs), []))
    answers: list[LoRALoaded] = []
    for _, future in list(pool._reading):
        future.exception(timeout=30)
    answers += pool.take_loaded()
    return answers


def test_slots_refer_to_what_was_loaded() -> None:
    reader = Reader()
    pool = LoRAMemoryPool(2, reader)
    assert load(pool, ref(1, "/x"), ref(2, "/y")) == [
        LoRALoaded(1, ok=True, rank=4),
        LoRALoaded(2, ok=True, rank=4),
    ]
    assert not pool.loading
    pool.write([(1, 2), (2, 1)])
    assert pool.of([1, 0, 2]) == [reader.made["y"], None, reader.made["x"]]
    pool.write([(1, 0)])
    pool.follow(LoRAOrders([], [2]))
    assert pool.of([1, 2]) == [None, reader.made["x"]]
    assert pool.of([]) == []
    pool.close()


def test_a_dropped_adapter_leaves_its_slot_though_no_step_follows() -> None:
    """What clears the slot comes with the next step: a server without work would keep it."""
    reader = Reader()
    pool = LoRAMemoryPool(2, reader)
    load(pool, ref(1, "/x"), ref(2, "/y"))
    pool.write([(1, 1), (2, 2)])
    pool.follow(LoRAOrders([], [1]))
    assert pool.of([1, 2]) == [None, reader.made["y"]]
    pool.write([(1, 0)])
    assert pool.of([1, 2]) == [None, reader.made["y"]]
    pool.close()


def test_a_load_is_beside_the_steps() -> None:
    reader = Reader()
    pool = LoRAMemoryPool(1, reader)
    pool.follow(LoRAOrders([ref(1, "/slow")], []))
    assert pool.loading
    assert pool.take_loaded() == []
    reader.go_on.set()
    for _, future in list(pool._reading):
        future.result(timeout=30)
    assert pool.take_loaded() == [LoRALoaded(1, ok=True, rank=4)]
    pool.close()


def test_a_load_that_fails_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    pool = LoRAMemoryPool(1, Reader())
    with caplog.at_level(logging.ERROR):
        wrong, broken, fine = load(pool, ref(1, "/wrong"), ref(2, "/broken"), ref(3, "/fine"))
    assert wrong == LoRALoaded(1, ok=False, message="target_modules name no module", status=400)
    assert (broken.lora_id, broken.ok, broken.status) == (2, False, 500)
    assert "a bug" in caplog.text
    assert fine.ok
    pool.close()
