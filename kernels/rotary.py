"""Rotary position embedding, halves paired as in GPT-NeoX. Called by rotary_kv_store.py."""

import torch


def apply_rotary(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate pair (i, i + D/2) of every head in place by its position's angle (arXiv:2104.09864).

    x [T, N, D] (any strides), positions [T] int64, cos_sin [P, D] float32: D/2 cosines, then D/2
    sines for each position. Query and key heads may be passed as one x.
    Raises ValueError on shapes that disagree.
    """
    if x.dim() != 3 or cos_sin.shape[-1] != x.shape[-1] or positions.shape != x.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, positions {tuple(positions.shape)} and cos_sin "
            f"{tuple(cos_sin.shape)} do not fit"
        )
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, D/2]
    first, second = x.chunk(2, dim=-1)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


def apply_rotary_reference(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """Compute apply_rotary with complex numbers, into a new tensor."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].float(), x[..., half:].float())
    angles = cos_sin[positions].float()
    turned = pairs * torch.complex(angles[:, :half], angles[:, half:])[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)
