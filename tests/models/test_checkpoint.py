"""Reading a checkpoint in pieces: how large they are, and that they make up the whole tensor."""

from contextlib import closing

import pytest
import torch

from tokenloom.kernels.quantised_linear import StreamedRows
from tokenloom.scheduler_proc.models.checkpoint import Index, RowReader, row_slices


class Recorded:
    """One matrix of a vocabulary's size; notes how many elements each read asks for."""

    def __init__(self, n: int, k: int) -> None:
        self.matrix = torch.arange(n * k, dtype=torch.float32).view(n, k).to(torch.bfloat16)
        self.sizes: list[int] = []
        self.names = ["x"]

    def shape(self, name: str) -> list[int]:
        return list(self.matrix.shape)

    def read(self, name: str, index: Index) -> torch.Tensor:
        part = self.matrix[index]
        self.sizes.append(part.numel())
        return part

    def blocks(self, name: str) -> StreamedRows | None:
        return None


def test_no_matrix_is_read_as_a_whole() -> None:
    checkpoint = Recorded(20_001, 256)
    with closing(RowReader(checkpoint, head_dim=64)) as reader:
        rows = reader.rows("x")
        whole = torch.cat([piece.clone() for piece in rows.pieces])
    assert torch.equal(whole, checkpoint.matrix.float())
    assert max(checkpoint.sizes) <= 1 << 19
    assert len(checkpoint.sizes) == 10


def test_pieces_lie_in_a_few_buffers() -> None:
    checkpoint = Recorded(20_001, 256)
    with closing(RowReader(checkpoint, head_dim=64)) as reader:
        places = {piece.data_ptr() for _ in range(2) for piece in reader.rows("x").pieces}
    assert len(places) <= 6


@pytest.mark.parametrize("head_dim", [64, 80, 24])
@pytest.mark.parametrize("shape", [(1, 8), (97, 1 << 16), (5000, 4096), (151_936,)])
def test_slices_are_whole_heads_and_cover_all_rows(shape: tuple[int, ...], head_dim: int) -> None:
    slices = list(row_slices(shape, head_dim))
    assert [one.start for one in slices[1:]] == [one.stop for one in slices[:-1]]
    assert (slices[0].start, slices[-1].stop) == (0, shape[0])
    assert all(one.start % head_dim == one.start % 16 == 0 for one in slices)


def test_error_of_a_reader_reaches_the_loader() -> None:
    class Broken(Recorded):
        def read(self, name: str, index: Index) -> torch.Tensor:
            raise OSError("the disk is gone")

    with closing(RowReader(Broken(64, 64), head_dim=64)) as reader:
        pieces = reader.rows("x").pieces
        with pytest.raises(OSError, match="the disk is gone"):
            list(pieces)
