"""rotary_kv_store: the torch path and the interpreted Triton kernel against the references."""

import pytest
import torch
from support.interpreted import as_if_on_device

from tokenloom.kernels.kv_store import as_stored, kv_store_reference
from tokenloom.kernels.rotary import apply_rotary_reference
from tokenloom.kernels.rotary_kv_store import rotary_kv_store

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POSITIONS, SLOTS = 50, 12
Case = tuple[torch.Tensor, int, int, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(name="path", params=["torch", "triton"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        as_if_on_device(monkeypatch)


def case(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Case:
    """qkv, heads, KV heads, positions, cos_sin, out_cache_loc."""
    generator = torch.Generator().manual_seed(0)
    # Rows of a wider tensor.
    whole = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 3, generator=generator)
    qkv = whole.to(dtype)[:, :-3].unflatten(1, (-1, head_dim))
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    angles = torch.outer(torch.arange(POSITIONS), 0.3 ** torch.arange(head_dim // 2).float())
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (
        qkv,
        heads,
        kv_heads,
        positions,
        cos_sin,
        torch.randperm(SLOTS, generator=generator)[:tokens],
    )


def empty_cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((SLOTS, kv_heads, head_dim), torch.nan).to(dtype)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 2, 1, 8), (1, 1, 1, 2), (3, 9, 3, 10), (2, 4, 4, 16)])
def test_equals_references(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    qkv, heads, kv_heads, positions, cos_sin, loc = case(*shape, dtype)
    before = qkv.clone()
    turned = apply_rotary_reference(before[:, : heads + kv_heads], positions, cos_sin)
    k_cache, v_cache = (empty_cache(kv_heads, shape[3], dtype) for _ in range(2))
    expected = [
        kv_store_reference(turned[:, heads:], k_cache.float(), loc),
        kv_store_reference(before[:, heads + kv_heads :], v_cache, loc).float(),
    ]
    rotary_kv_store(qkv, heads, kv_heads, positions, cos_sin, k_cache, v_cache, loc)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(qkv[:, : heads + kv_heads].float(), turned, **close)
    torch.testing.assert_close(k_cache.float(), expected[0], **close)
    torch.testing.assert_close(v_cache.float(), expected[1], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_scaled_and_saturate(cache_dtype: torch.dtype) -> None:
    qkv, heads, kv_heads, _, cos_sin, loc = case(4, 3, 2, 8, torch.float32)
    # Numbers that eight bits hold, and no turn: the interpreter does not round to eight bits well.
    qkv[:] = as_stored(qkv, cache_dtype, 1.0).float()
    qkv[0] *= 1e6
    caches = [empty_cache(kv_heads, 8, cache_dtype) for _ in range(2)]
    no_turn = torch.zeros(4, dtype=torch.int64)
    rotary_kv_store(qkv, heads, kv_heads, no_turn, cos_sin, *caches, loc, 0.5, 0.25)
    largest = torch.finfo(cache_dtype).max
    for cache, first, scale in zip(caches, (heads, heads + kv_heads), (0.5, 0.25), strict=True):
        expected = qkv[:, first : first + kv_heads] / scale
        assert expected.abs().max() > largest
        assert torch.equal(cache[loc].float(), expected.clamp(-largest, largest))


def test_shapes_are_checked() -> None:
    qkv, heads, kv_heads, positions, cos_sin, loc = case(2, 3, 2, 8, torch.float32)
    cache = empty_cache(kv_heads, 8, torch.float32)
    for wrong in (
        (qkv, heads + 1, kv_heads, positions, cos_sin, cache, cache, loc),
        (qkv, heads, kv_heads, positions[:1], cos_sin, cache, cache, loc),
        (qkv, heads, kv_heads, positions, cos_sin[:, :6], cache, cache, loc),
        (qkv, heads, kv_heads, positions, cos_sin, cache[:, :1], cache, loc),
        (qkv, heads, kv_heads, positions, cos_sin, cache, cache, loc[:1]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            rotary_kv_store(*wrong)
