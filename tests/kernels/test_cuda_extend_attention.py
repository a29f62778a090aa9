"""The Triton kernel of extend attention, interpreted, against token-by-token softmax."""

import pytest
import torch
import triton.language as tl
from support.paged_case import E5M2, K_SCALE, SHAPES, V_SCALE, PagedCase, make_case, spread_over

from tokenloom.kernels.cuda import extend_attention as op
from tokenloom.kernels.cuda.extend_attention import extend_attention


def run(case: PagedCase) -> torch.Tensor:
    out = case.empty_out()
    extend_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.rows,
        case.prefix_lens,
        case.extend_lens,
        case.query_starts,
        out,
        page_size=case.page_size,
        scale=case.scale,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    return out


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_tiles", lambda *_: (16, 16, 4, 2))


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype", "cache"), SHAPES)
def test_equals_reference(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = (32, 32, 4, 2)
    monkeypatch.setattr(op, "_tiles", lambda *_: tiles)
    requests = [(0, 1), (40, 9), (0, 11), (33, 1)]
    case = make_case(requests, heads, head_dim, page_size, dtype, cache)
    case.check(run(case))


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.usefixtures("small_tiles")
def test_lengths_around_borders_of_tiles_and_blocks(group: int) -> None:
    tile = 16 // group
    lengths = [(0, tile), (15, tile + 1), (16, tile - 1), (17, 2 * tile + 1), (1, 2 * tile)]
    case = make_case(lengths, (group, 1), 64)
    case.check(run(case))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_tiles_as_on_a_device(head_dim: int) -> None:
    rows = op._tiles(head_dim, tl.float16, 2)[0]
    case = make_case([(70, rows + 5), (0, 3)], (1, 1), head_dim, 16, torch.float16)
    case.check(run(case))


@pytest.mark.usefixtures("small_tiles")
def test_requests_are_found_in_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "SEARCH_BLOCK", 2)
    case = make_case([(0, 1), (0, 20), (3, 1), (0, 5), (2, 17)], (2, 1), 64)
    case.check(run(case))


@pytest.mark.usefixtures("small_tiles")
def test_tokens_before_the_first_request_are_left_alone() -> None:
    case = make_case([(0, 1)] * 17 + [(2, 9), (0, 3)], (2, 1), 64)
    first = 17
    out = case.empty_out()
    extend_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.rows[first:],
        case.prefix_lens[first:],
        case.extend_lens[first:],
        case.query_starts[first:],
        out,
        page_size=case.page_size,
        scale=case.scale,
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    assert out[:first].isnan().all()
    for index in (first, first + 1):
        start, end = case.query_starts[index : index + 2].tolist()
        case.alone(index).check(out[start:end])


@pytest.mark.usefixtures("small_tiles")
def test_a_request_is_the_same_in_any_batch() -> None:
    case = make_case([(3, 1), (0, 7), (20, 1), (1, 13)], (3, 1), 80, 3, torch.float16)
    together = run(case).split([extend for _, extend in case.requests])
    for index, expected in enumerate(together):
        assert torch.equal(run(case.alone(index)), expected)


@pytest.mark.usefixtures("small_tiles")
def test_addresses_have_64_bits() -> None:
    case = make_case([(20, 9)], (2, 1), 64, 16, torch.float32, E5M2)
    spread_over(case, 1 << 26)
    assert int(case.slots(0).max()) << 26 > 1 << 31
    case.check(run(case))


@pytest.mark.usefixtures("small_tiles")
def test_the_largest_scores_do_not_overflow() -> None:
    case = make_case([(5, 20)], (2, 1), 64, dtype=torch.float16)
    case.q *= 50
    case.check(run(case))


def test_no_tokens() -> None:
    case = make_case([(0, 1)], (2, 1), 64)
    case.q, case.rows, case.requests = case.q[:0], case.rows[:0], []
    assert run(case).shape == (0, 2, 64)
