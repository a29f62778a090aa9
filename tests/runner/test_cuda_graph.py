"""Which graph serves a step and why none does; what is captured, in which order, into what."""

from array import array

import pytest
import torch
from runner.fake_device import FakeDevice

from tokenloom.scheduler_proc.runner.cuda_graph import CudaGraphRunner, GraphKey, ladder
from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch


def step(
    rows: int, mode: ForwardMode = ForwardMode.DECODE, *, lora: bool = False
) -> ModelWorkerBatch:
    return ModelWorkerBatch(
        step=1,
        mode=mode,
        num_decodes=rows,
        rows=list(range(rows)),
        prefix_lens=[4] * rows,
        extend_lens=[1] * rows,
        samples=[True] * rows,
        input_ids=array("i"),
        new_pages=[],
        opened=[],
        lora_slots=[1] * rows if lora else [],
    )


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 5, 37, 64, 100, 256, 300])
def test_the_ladder_ends_where_it_is_told_and_pads_little(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[-1:] or [0]) == [largest]
    for rows in range(1, largest + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows <= max(3, rows // 4)


def test_the_largest_is_captured_first_and_each_with_adapters_before_without() -> None:
    runner = CudaGraphRunner(FakeDevice(), [1, 2, 4], with_lora=True)
    order = [(4, True), (4, False), (2, True), (2, False), (1, True), (1, False)]
    assert runner.keys() == [GraphKey(*one) for one in order]
    prepared: list[GraphKey] = []
    captured: list[GraphKey] = []

    def forward(key: GraphKey) -> torch.Tensor:
        assert prepared[-1] == key, "what is run before a capture computes a prepared step"
        captured.append(key)
        return torch.zeros(key.size, 3)

    runner.capture(prepared.append, forward)
    assert list(dict.fromkeys(captured)) == runner.keys() == prepared


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    runner = CudaGraphRunner(FakeDevice(), [1, 2, 4], with_lora=True)
    chosen = [runner.choose(step(rows)) for rows in (1, 2, 3, 4)]
    assert [choice.key for choice in chosen] == [
        GraphKey(size, lora=False) for size in (1, 2, 4, 4)
    ]
    assert chosen[2].reason == "graph 4"
    choice = runner.choose(step(3, lora=True))
    assert choice == (GraphKey(4, lora=True), "graph 4 lora")


def test_why_a_step_runs_eagerly_is_said() -> None:
    runner = CudaGraphRunner(FakeDevice(), [1, 2, 4], with_lora=False)
    assert runner.choose(step(5)) == (None, "eager: 5 rows, graphs hold 4")
    assert runner.choose(step(2, ForwardMode.MIXED)) == (None, "eager: mixed")
    assert runner.choose(step(2, ForwardMode.EXTEND)) == (None, "eager: extend")
    off = CudaGraphRunner(FakeDevice(), [], with_lora=False)
    assert off.choose(step(1)) == (None, "eager: graphs are off")


def test_a_replay_computes_what_the_buffers_hold_by_then() -> None:
    held = torch.zeros(2)
    out = torch.zeros(2, 1)

    def forward(key: GraphKey) -> torch.Tensor:
        return out[: key.size].copy_(held[: key.size, None] * 10)

    runner = CudaGraphRunner(FakeDevice(), [1, 2], with_lora=False)
    runner.capture(lambda key: None, forward)
    held.copy_(torch.tensor([3.0, 4.0]))
    assert runner.replay(GraphKey(2, lora=False)).tolist() == [[30.0], [40.0]]
    assert runner.replay(GraphKey(1, lora=False)).tolist() == [[30.0]]


def test_the_graphs_of_a_runner_share_a_stream_with_no_other_runner() -> None:
    """Graphs of one stream share a workspace, which goes when one of them is reset."""
    device = FakeDevice()
    runners = [CudaGraphRunner(device, [1, 2], with_lora=True) for _ in range(2)]
    used = []
    for runner in runners:
        device.graphs.clear()
        runner.capture(lambda key: None, lambda key: torch.zeros(key.size, 1))
        assert len(device.graphs) == 4
        used.append({graph.stream for graph in device.graphs})
    assert [len(streams) for streams in used] == [1, 1]
    assert used[0] != used[1]
