"""paged_attention against token-by-token softmax: odd shapes, poisoned slots, batch-mates."""

from dataclasses import dataclass

import pytest
import torch

from tokenloom.kernels import paged_attention as op
from tokenloom.kernels.paged_attention import paged_attention, paged_attention_reference

NUM_SLOTS = 300


@dataclass
class Case:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: list[torch.Tensor]
    extend_lens: list[int]

    def run(self) -> torch.Tensor:
        scale = self.q.shape[-1] ** -0.5
        return paged_attention(
            self.q, self.k_cache, self.v_cache, self.slots, self.extend_lens, scale
        )

    def expected(self) -> torch.Tensor:
        scale = self.q.shape[-1] ** -0.5
        return paged_attention_reference(
            self.q, self.k_cache, self.v_cache, self.slots, self.extend_lens, scale
        )


def make(requests: list[tuple[int, int]], heads: tuple[int, int], head_dim: int) -> Case:
    """`requests` are (prefix, extend) lengths. Slots of no request are NaN."""
    generator = torch.Generator().manual_seed(0)
    query_heads, kv_heads = heads
    order = torch.randperm(NUM_SLOTS, generator=generator)
    caches = torch.full((2, NUM_SLOTS, kv_heads, head_dim), torch.nan)
    slots = list(order.split([a + b for a, b in requests] + [NUM_SLOTS - sum(map(sum, requests))]))
    for used in slots[:-1]:
        caches[:, used] = torch.randn(2, len(used), kv_heads, head_dim, generator=generator)
    extend_lens = [extend for _, extend in requests]
    q = torch.randn(sum(extend_lens), query_heads, head_dim, generator=generator)
    return Case(q, caches[0], caches[1], slots[:-1], extend_lens)


@pytest.mark.parametrize("head_dim", [2, 12, 80])
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 3), (4, 4), (7, 1)])
@pytest.mark.parametrize(
    "requests",
    [
        [],
        [(0, 1)],
        [(16, 1), (0, 1), (33, 1)],
        [(0, 19)],
        [(17, 5), (0, 2)],
        [(3, 1), (0, 7), (20, 1), (1, 30)],
    ],
)
def test_equals_reference(
    requests: list[tuple[int, int]], heads: tuple[int, int], head_dim: int
) -> None:
    case = make(requests, heads, head_dim)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 7])
def test_long_extends_are_cut_into_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "QUERY_BLOCK", block)
    case = make([(5, 23), (0, 8)], (6, 2), 12)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


def test_bfloat16() -> None:
    case = make([(9, 1), (4, 11)], (6, 2), 16)
    low = Case(
        case.q.bfloat16(),
        case.k_cache.bfloat16(),
        case.v_cache.bfloat16(),
        case.slots,
        case.extend_lens,
    )
    assert low.run().dtype == torch.bfloat16
    torch.testing.assert_close(low.run().float(), low.expected(), atol=3e-2, rtol=3e-2)


def test_batch_mates_change_no_bit() -> None:
    case = make([(3, 1), (0, 7), (20, 1), (1, 30)], (6, 3), 12)
    together = case.run().split(case.extend_lens)
    for index, q in enumerate(case.q.split(case.extend_lens)):
        alone = Case(q, case.k_cache, case.v_cache, [case.slots[index]], [case.extend_lens[index]])
        torch.testing.assert_close(alone.run(), together[index], atol=0, rtol=0)


def test_queries_may_be_part_of_a_wider_tensor() -> None:
    case = make([(3, 1), (0, 7)], (6, 3), 12)
    expected = case.expected()
    case.q = torch.cat((case.q, torch.full((8, 6, 12), torch.nan)), dim=1)[:, :6]
    torch.testing.assert_close(case.run(), expected, atol=1e-5, rtol=1e-5)


def test_shapes_are_checked() -> None:
    case = make([(3, 2)], (6, 3), 12)
    for broken, message in (
        (Case(case.q[:, :5], case.k_cache, case.v_cache, case.slots, [2]), "5 query heads"),
        (Case(case.q, case.k_cache, case.v_cache, case.slots, [1]), "do not cover"),
        (Case(case.q, case.k_cache, case.v_cache, [case.slots[0][:1]], [2]), "among 1 positions"),
        (Case(case.q[..., :8], case.k_cache, case.v_cache, case.slots, [2]), "do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            broken.run()
