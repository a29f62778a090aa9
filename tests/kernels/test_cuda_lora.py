"""The ops of low-rank adapters: the torch path and the interpreted Triton kernels."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.interpreted import as_if_on_device

from tokenloom.kernels.lora import (
    DECODE_CHUNK,
    EXTEND_CHUNK,
    LoRALinear,
    LoRASegments,
    lora_expand,
    lora_reference,
    lora_shrink,
    lora_shrink_ids,
    max_chunks,
    plan_segments,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RANKS = [99, 0, 1, 16, 20]  # by slot; what slot 0 says is never read
R_MAX = 20
SLOTS = [2, 0, 4, 3, 4, 1, 0, 2]  # of each token
PARTS = {"o": (70,), "gate_up": (66, 66), "qkv": (70, 20, 20)}


@pytest.fixture(name="path", params=["torch", "triton"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        as_if_on_device(monkeypatch)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def adapters(size: int, parts: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LoRALinear:
    """Beyond its rank a slot holds NaN, as another adapter might have left."""
    a = random(len(RANKS), len(parts) * R_MAX, size).mul_(size**-0.5).to(dtype)
    b = random(len(RANKS), sum(parts), R_MAX).mul_(0.25).to(dtype)
    for slot, rank in enumerate(RANKS):
        a[slot].view(len(parts), R_MAX, size)[:, rank if slot else 0 :] = torch.nan
        b[slot, :, rank if slot else 0 :] = torch.nan
    return LoRALinear(a, b, torch.tensor(RANKS, dtype=torch.int32), parts)


def segments(slots: Sequence[int], chunk_tokens: int, spare: int = 1) -> LoRASegments:
    plan = plan_segments(slots, chunk_tokens)
    of_chunks = (plan.starts, plan.lens, plan.slots)
    starts, lens, chunk_slots = (torch.from_numpy(np.pad(one, (0, spare))) for one in of_chunks)
    return LoRASegments(torch.from_numpy(plan.order), starts, lens, chunk_slots, chunk_tokens)


def added(
    x: torch.Tensor, linear: LoRALinear, slots: Sequence[int], chunk_tokens: int = DECODE_CHUNK
) -> torch.Tensor:
    where = segments(slots, chunk_tokens)
    y = torch.zeros(len(slots), linear.b.shape[1])
    lora_expand(lora_shrink(x, linear, where), linear, where, y)
    return y


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.usefixtures("path")
def test_equals_reference(parts: str, dtype: torch.dtype) -> None:
    linear = adapters(50, PARTS[parts], dtype)
    x = random(len(SLOTS), 60, dtype=dtype)[:, :50]
    wide = random(len(SLOTS), linear.b.shape[1] + 3, dtype=dtype)
    base, y = wide.clone(), wide[:, :-3]
    where = segments(SLOTS, DECODE_CHUNK)
    lora_expand(lora_shrink(x, linear, where), linear, where, y)
    expected = base[:, :-3].float() + lora_reference(x, linear, SLOTS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)
    for token, slot in enumerate(SLOTS):
        assert slot or torch.equal(wide[token], base[token])
    assert torch.equal(wide[:, -3:], base[:, -3:])


@pytest.mark.usefixtures("path")
def test_a_long_input_equals_the_reference() -> None:
    linear, x = adapters(1100, (70,)), random(3, 1100)
    expected = lora_reference(x, linear, [4, 4, 2])
    torch.testing.assert_close(added(x, linear, [4, 4, 2]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("path")
def test_a_row_is_the_same_alone_and_among_others_and_in_chunks_of_either_length() -> None:
    """The sum of a range is exact, so that it shows in which order the ranges are added."""
    linear = adapters(1100, (R_MAX,))
    linear.a[4] = (random(R_MAX, 1100) * 2).round()
    linear.a[4, :, 512:1024] *= 2.0**-18
    linear.a[4, :, 1024:] *= 2.0**-17
    linear.b[4] = torch.eye(R_MAX)
    slots = [4] * 18 + [2]
    x = (random(len(slots), 1100) * 2).round()
    together = added(x, linear, slots)
    exact = torch.stack([linear.a[4].double() @ row.double() for row in x[:18]])
    assert not torch.equal(together[:18].double(), exact)
    assert torch.equal(together[:18], added(x, linear, slots, EXTEND_CHUNK)[:18])
    assert torch.equal(together[17:18], added(x[17:18], linear, [4]))


def test_ranges_have_programs_of_their_own_in_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = adapters(1100, (70,)), random(1, 1100)
    as_if_on_device(monkeypatch)
    assert lora_shrink(x, linear, segments([4], DECODE_CHUNK)).shape == (3, 1, R_MAX)
    assert lora_shrink(x, linear, segments([4], EXTEND_CHUNK)).shape == (1, 1, R_MAX)


@pytest.mark.parametrize("chunk_tokens", [DECODE_CHUNK, EXTEND_CHUNK])
@pytest.mark.usefixtures("path")
def test_an_embedding_reads_columns(chunk_tokens: int) -> None:
    linear = adapters(30, (12,))
    ids = torch.tensor([3, 29, 0, 7, 3, 1, 5, 8])
    where = segments(SLOTS, chunk_tokens)
    y = torch.zeros(len(SLOTS), 12)
    lora_expand(lora_shrink_ids(ids, linear, where), linear, where, y)
    expected = lora_reference(torch.nn.functional.one_hot(ids, 30).float(), linear, SLOTS)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("slots", [[], [0], [0, 0, 0]])
@pytest.mark.usefixtures("path")
def test_nothing_is_added_without_adapters(slots: list[int]) -> None:
    linear = adapters(50, PARTS["qkv"])
    assert not added(random(len(slots), 50), linear, slots).any()
    no_chunks = segments(slots, DECODE_CHUNK, spare=0)
    h = lora_shrink(random(len(slots), 50), linear, no_chunks)
    lora_expand(h, linear, no_chunks, torch.zeros(len(slots), 110))
    lora_shrink_ids(torch.zeros(len(slots), dtype=torch.int64), adapters(50, (12,)), no_chunks)


def test_a_plan_covers_each_token_of_an_adapter_once() -> None:
    rng = np.random.default_rng(0)
    for tokens, adapter_count, chunk in ((1, 1, 16), (40, 3, 4), (200, 8, 16), (7, 7, 32)):
        slots = rng.integers(0, adapter_count + 1, tokens)
        plan = plan_segments(slots, chunk)
        covered = [
            (token, slot)
            for start, length, slot in zip(plan.starts, plan.lens, plan.slots, strict=True)
            for token in plan.order[start : start + length]
        ]
        assert sorted(covered) == [(token, slot) for token, slot in enumerate(slots) if slot]
        assert len(plan.slots) <= max_chunks(tokens, adapter_count, chunk)
        assert plan.lens.max(initial=1) <= chunk
        assert plan.lens.min(initial=1) >= 1


def test_the_most_chunks_are_reached_and_never_passed() -> None:
    for tokens, adapter_count, chunk in ((3, 5, 16), (20, 2, 4), (33, 3, 16)):
        bound = max_chunks(tokens, adapter_count, chunk)
        others = range(1, min(adapter_count, tokens))  # one token each, the rest has one slot
        worst = [*others, *[adapter_count] * (tokens - len(others))]
        assert len(plan_segments(worst, chunk).slots) in (bound, bound - 1)
    assert len(plan_segments([1, 2, 3], 16).slots) == max_chunks(3, 5, 16) == 3


def test_shapes_are_checked() -> None:
    linear, where = adapters(50, PARTS["qkv"]), segments(SLOTS, DECODE_CHUNK)
    h = lora_shrink(random(8, 50), linear, where)
    with pytest.raises(ValueError, match="do not fit"):
        LoRALinear(linear.a, linear.b, linear.ranks, (70, 40))
    with pytest.raises(ValueError, match="does not fit"):
        lora_shrink(random(8, 51), linear, where)
    with pytest.raises(ValueError, match="does not fit"):
        lora_shrink(random(8, 50, dtype=torch.float16), linear, where)
    with pytest.raises(ValueError, match="do not fit"):
        lora_expand(h, linear, where, torch.zeros(8, 109))
    with pytest.raises(ValueError, match="not of one"):
        lora_shrink_ids(torch.zeros(8, dtype=torch.int64), linear, where)
