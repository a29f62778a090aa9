"""The Triton kernels of decode attention, interpreted, against token-by-token softmax."""

import pytest
import torch
from support.paged_case import E5M2, K_SCALE, SHAPES, V_SCALE, PagedCase, make_case, spread_over

from tokenloom.kernels.cuda import decode_attention as op
from tokenloom.kernels.cuda.decode_attention import DecodeScratch, decode_attention


def decodes(*lengths: int) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in lengths]


def run(case: PagedCase, max_splits: int | None = None) -> torch.Tensor:
    _, heads, head_dim = case.q.shape
    if max_splits is None:
        max_context = case.page_table.shape[1] * case.page_size
        max_splits = op.max_splits(case.k_cache.shape[1], max_context)
    scratch = DecodeScratch(len(case.rows) + 1, heads, head_dim, max_splits, case.q.device)
    scratch.partial.fill_(torch.nan)
    scratch.log_sums.fill_(torch.nan)
    out = case.empty_out()
    decode_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.rows,
        case.context_lens,
        out,
        scratch,
        page_size=case.page_size,
        scale=case.scale,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    return out


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 16 tokens and tiles of as many, for all head dimensions."""
    monkeypatch.setattr(op, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(op, "TILE_BYTES", 1)


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype", "cache"), SHAPES)
def test_equals_reference(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "SPLIT_TOKENS", 64)
    case = make_case(decodes(1, 130), heads, head_dim, page_size, dtype, cache)
    case.check(run(case))


@pytest.mark.parametrize("max_splits", [1, 3])
@pytest.mark.usefixtures("small_splits")
def test_lengths_around_borders_of_tiles_and_splits(max_splits: int) -> None:
    case = make_case(decodes(15, 16, 17, 48, 49, 97), (1, 1), 64)
    case.check(run(case, max_splits))


@pytest.mark.usefixtures("small_splits")
def test_more_splits_than_the_lanes_of_a_merge_and_than_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(decodes(16 * (2 * op.MERGE_BLOCK + 1) - 3, 5), (2, 1), 64)
    one_each = run(case)
    case.check(one_each)
    monkeypatch.setattr(op, "PROGRAMS_OF_A_STEP", 1)
    assert torch.equal(run(case), one_each)


@pytest.mark.usefixtures("small_splits")
def test_a_row_is_the_same_in_any_batch() -> None:
    case = make_case(decodes(40, 3, 70), (3, 1), 80, 3, torch.float16)
    together = run(case, 4)
    for index in range(len(case.rows)):
        assert torch.equal(run(case.alone(index), 4), together[index : index + 1])


def test_padded_rows_of_a_graph_read_page_0() -> None:
    case = make_case(decodes(20, 1), (2, 2), 64)
    case.page_table[case.rows[1].long()] = 0
    for one in (case.k_cache, case.v_cache):
        one[: case.page_size] = 7.0
    case.check(run(case))


def test_addresses_have_64_bits() -> None:
    case = make_case(decodes(30), (2, 1), 64, 16, torch.float32, E5M2)
    spread_over(case, 1 << 26)
    assert int(case.slots(0).max()) << 26 > 1 << 31
    case.check(run(case))


def test_the_largest_scores_do_not_overflow() -> None:
    case = make_case(decodes(50), (2, 1), 64, dtype=torch.float16)
    case.q *= 50
    case.check(run(case))


def test_heads_must_be_dense() -> None:
    case = make_case(decodes(5), (2, 1), 64)
    case.v_cache = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2]
    with pytest.raises(ValueError, match="head dimension of v has stride"):
        run(case)


def test_the_longest_row_of_a_model_fills_the_device_and_short_ones_are_cut_less() -> None:
    assert op.max_splits(kv_heads=8, max_context=1 << 17) == 32
    assert op.max_splits(kv_heads=1, max_context=1 << 17) == 128
    assert op.max_splits(kv_heads=64, max_context=1 << 17) == 8
    assert op.max_splits(kv_heads=8, max_context=1025) == 5
