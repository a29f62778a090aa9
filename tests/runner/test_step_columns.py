"""The columns of a step against plain arithmetic; padding that nobody can see."""

from array import array

import torch

from tokenloom.kernels.lora import plan_segments
from tokenloom.scheduler_proc.models.device_batch import Layout, StepColumns
from tokenloom.scheduler_proc.runner.kv_pool import SlotTable
from tokenloom.scheduler_proc.runner.step_columns import NO_ROW, StepPlan, decode_layout
from tokenloom.scheduler_proc.worker_batch import ForwardMode, ModelWorkerBatch

PAD_ROW = 6
POISON = -7777


def slots() -> SlotTable:
    table = SlotTable(PAD_ROW, 32, 4)
    table.set_pages([(row, index, 1 + 8 * row + index) for row in range(6) for index in range(8)])
    return table


def slot(row: int, position: int) -> int:
    return (1 + 8 * row + position // 4) * 4 + position % 4


def filled(plan: StepPlan, layout: Layout) -> dict[str, list[int]]:
    buffer = torch.full((layout.size + 5,), POISON, dtype=torch.int32)
    columns = StepColumns.of(buffer, layout)
    plan.fill(columns, slots(), PAD_ROW)
    assert (buffer[layout.size :] == POISON).all()
    assert (buffer[: layout.size] != POISON).all(), "every number of the layout is written"
    return {name: getattr(columns, name).tolist() for name in columns.names()}


def mixed(lora_slots: list[int]) -> ModelWorkerBatch:
    """Two decodes, an inner piece of a prompt, a last piece."""
    return ModelWorkerBatch(
        step=1,
        mode=ForwardMode.MIXED,
        num_decodes=2,
        rows=[3, 0, 5, 1],
        prefix_lens=[9, 2, 4, 0],
        extend_lens=[1, 1, 3, 2],
        samples=[True, True, False, True],
        input_ids=array("i", [11, 12, 13, 21, 22]),
        new_pages=[],
        opened=[],
        lora_slots=lora_slots,
    )


def test_a_mixed_step_in_its_own_size() -> None:
    plan = StepPlan(mixed([]), max_loras=2)
    assert plan.layout == Layout(tokens=7, requests=4, samples=3, decodes=2)
    columns = filled(plan, plan.layout)
    assert columns["input_ids"] == [0, 0, 11, 12, 13, 21, 22]
    assert columns["token_rows"] == [3, 0, *[NO_ROW] * 5]
    assert columns["positions"] == [9, 2, 4, 5, 6, 0, 1]
    tokens = [(3, 9), (0, 2), (5, 4), (5, 5), (5, 6), (1, 0), (1, 1)]
    assert columns["out_cache_loc"] == [slot(*token) for token in tokens]
    assert columns["rows"] == [3, 0, 5, 1]
    assert columns["context_lens"] == [10, 3, 7, 2]
    assert columns["query_starts"] == [0, 1, 2, 5, 7]
    assert columns["logit_indices"] == [0, 1, 6]
    assert columns["sample_rows"] == [3, 0, 1]


def test_adapters_of_tokens_and_of_samples() -> None:
    plan = StepPlan(mixed([0, 2, 1, 2]), max_loras=2)
    columns = filled(plan, plan.layout)
    for prefix, of in (("token", [0, 2, 1, 1, 1, 2, 2]), ("sample", [0, 2, 2])):
        expected = plan_segments(of, 32)
        for part in ("order", "starts", "lens", "slots"):
            assert columns[f"{prefix}_{part}"] == getattr(expected, part).tolist(), (prefix, part)


def test_padding_is_one_token_of_the_padding_row_in_page_0() -> None:
    batch = ModelWorkerBatch(
        step=1,
        mode=ForwardMode.DECODE,
        num_decodes=2,
        rows=[4, 2],
        prefix_lens=[6, 1],
        extend_lens=[1, 1],
        samples=[True, True],
        input_ids=array("i"),
        new_pages=[],
        opened=[],
        lora_slots=[1, 0],
    )
    layout = decode_layout(4, max_loras=2)
    columns = filled(StepPlan(batch, max_loras=2), layout)
    assert columns["token_rows"] == [4, 2, NO_ROW, NO_ROW]
    assert columns["out_cache_loc"] == [slot(4, 6), slot(2, 1), 0, 0]
    assert columns["rows"] == [4, 2, PAD_ROW, PAD_ROW]
    assert columns["context_lens"] == [7, 2, 1, 1]
    assert columns["query_starts"] == [0, 1, 2, 3, 4]
    assert columns["logit_indices"] == [0, 1, 2, 3]
    assert columns["sample_rows"] == [4, 2, NO_ROW, NO_ROW]
    assert columns["token_slots"][0] == 1
    assert not any(columns["token_slots"][1:]), "the base and padding are in no chunk"
    assert columns["sample_order"] == columns["token_order"]


def test_no_layout_moves_the_columns_of_another_step_of_its_kind() -> None:
    """A graph finds every later step where the first one lay."""
    layout = decode_layout(4, max_loras=2)
    buffer = torch.zeros(layout.size, dtype=torch.int32)
    first, second = StepColumns.of(buffer, layout), StepColumns.of(buffer, layout)
    for name in first.names():
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
