"""The ranks beside the scheduler: how a batch reaches them, and that they die with their parent."""

import dataclasses
from array import array
from pathlib import Path

import msgspec
import pytest
from support.server import wait_for

from tokenloom.child_process import ChildProcess, ChildState
from tokenloom.scheduler_proc import batch_codec
from tokenloom.scheduler_proc.ranks import COMMAND
from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch, RowOpen
from tokenloom.wire.child import ORPHANED
from tokenloom.wire.config import ExecutionConfig, Links, ModelConfig, SchedulerConfig
from tokenloom.wire.sampling import SamplingParams
from tokenloom.wire.scheduling_config import SchedulingConfig

BATCH = ModelWorkerBatch(
    step=7,
    mode=ForwardMode.MIXED,
    num_decodes=1,
    rows=[3, 0],
    prefix_lens=[40, 0],
    extend_lens=[1, 2],
    samples=[True, False],
    input_ids=array("i", [151_935, 0]),
    new_pages=[(3, 2, 9), (0, 0, 4)],
    opened=[
        RowOpen(
            row=0,
            sampling=SamplingParams(
                temperature=0.5, seed=(1 << 64) - 1, max_new_tokens=9, logit_bias={5: -1.5}
            ),
            prompt_ids=array("i", range(1000)),
            output_ids=array("i", [1]),
            banned_ids=(2, 3),
        )
    ],
    lora_slots=[0, 1],
    new_loras=[(1, 12)],
)


def test_a_batch_arrives_as_it_was() -> None:
    for field in dataclasses.fields(BATCH):
        if field.default_factory is not dataclasses.MISSING:
            assert getattr(BATCH, field.name) != field.default_factory(), "nothing is tested"
    assert batch_codec.decode(batch_codec.encode(BATCH)) == BATCH


def test_what_is_no_batch_is_an_error_and_not_dropped() -> None:
    frame = batch_codec.encode(BATCH)
    for broken in (b"", frame[:-1], frame.replace(b"rows", b"cols")):
        with pytest.raises(msgspec.DecodeError):
            batch_codec.decode(broken)


@pytest.mark.slow
def test_a_rank_ends_with_its_parent_while_it_waits_for_the_others(short_tmp: Path) -> None:
    config = SchedulerConfig(
        model=ModelConfig(model="/m"),
        scheduling=SchedulingConfig(),
        execution=ExecutionConfig(device="cpu", tensor_parallel=2),
        log_level="info",
        links=Links(str(short_tmp)),
    )
    rank = ChildProcess("rank1", (*COMMAND, "1"), config)
    try:
        wait_for(lambda: (short_tmp / "ranks").exists() or rank.reap() is not None)
        assert rank.state is ChildState.STARTING
        rank.close()  # as the kernel does when the parent is gone
        assert rank.reap() == ORPHANED
    finally:
        rank.kill()
        rank.close()
