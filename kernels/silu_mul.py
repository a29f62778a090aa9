"""Gated activation of the MLP. Called by the models."""

import torch
import torch.nn.functional as F

from . import backend


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up, silu(x) = x / (1 + exp(-x)). gate_up [..., 2 I] -> [..., I].

    The gate is the first half. Raises ValueError if the last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} has no two halves")
    if backend.on_triton(gate_up):
        from .cuda import silu_mul as kernel

        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        kernel.silu_mul(gate_up.flatten(0, -2), out.flatten(0, -2))
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return gate / (1 + torch.exp(-gate)) * up
