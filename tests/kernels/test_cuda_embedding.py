"""embed: the torch path and the interpreted Triton kernel against the reference."""

import pytest
import torch
from support.interpreted import as_if_on_device

from tokenloom.kernels.embedding import embed, embed_reference

LAST_TOKENS = torch.tensor([4, -1, 6, 99])  # -1: a row that failed; 99 is not in the table


@pytest.fixture(name="path", params=["torch", "triton"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        as_if_on_device(monkeypatch)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_equals_reference(dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    table = torch.randn(7, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    input_ids = torch.tensor([3, 0, 5, 1, 6, -2, 7], dtype=id_dtype)
    rows = torch.tensor([-1, 0, 1, -1, 3, -1, -1], dtype=torch.int32)
    rows_of_table, ids = embed(table, input_ids, rows, LAST_TOKENS.to(id_dtype))
    assert torch.equal(rows_of_table, embed_reference(table, input_ids, rows, LAST_TOKENS))
    assert ids.tolist() == [3, 4, 0, 1, 6, 0, 6]


@pytest.mark.usefixtures("path")
def test_no_tokens() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    assert embed(torch.ones(3, 5), nothing, nothing, LAST_TOKENS)[0].shape == (0, 5)


def test_shapes_are_checked() -> None:
    ids, rows = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        embed(torch.ones(3, 5), ids, rows, LAST_TOKENS)
