"""What ranks agree on before they compute. Groups of real ranks: models/test_parallel.py."""

from pathlib import Path

import pytest
import torch
from runner.test_model_runner import CONTEXT, HashModel, no_adapter

from tokenloom.model_files.errors import ModelError
from tokenloom.scheduler_proc.models.parallel import WHOLE, Shard
from tokenloom.scheduler_proc.runner import rank_group
from tokenloom.scheduler_proc.runner.kv_pool import KVShape
from tokenloom.scheduler_proc.runner.model_runner import LoadedModel, ModelRunner
from tokenloom.wire.config import ExecutionConfig
from tokenloom.wire.scheduling_config import SchedulingConfig


def test_one_rank_joins_nobody(tmp_path: Path) -> None:
    assert rank_group.join(0, str(tmp_path), ExecutionConfig()) is WHOLE
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_group, "choose_device", lambda asked: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="--tp 2 needs 2 CUDA devices, of which 1 are here"):
        rank_group.join(1, str(tmp_path), ExecutionConfig(tensor_parallel=2))


def test_pools_are_sized_by_the_rank_with_the_least_memory() -> None:
    """Two ranks of one machine take half of it each, the pool half of that."""
    page, least = 16, 20 * 16 * 8 * 2 * 2

    class Other(Shard):
        def smallest(self, number: int) -> int:
            assert number > least
            return least

    shape = KVShape(1, 1, 1, torch.float32)
    assert shape.bytes_per_token == 8
    loaded = LoadedModel(HashModel(), shape, CONTEXT, 50, "float32", no_adapter, Other(1, 2))
    scheduling = SchedulingConfig(page_size=page, max_running_requests=64)
    runner = ModelRunner(loaded, scheduling, ExecutionConfig(mem_fraction=0.5))
    assert runner.facts.max_total_tokens == 20 * page
