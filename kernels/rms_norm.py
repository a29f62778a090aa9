"""RMSNorm, optionally fused with the residual add before it. Called by the models."""

import torch
import torch.nn.functional as F

from . import backend


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y = s / sqrt(mean(s^2) + eps) * weight over the last dimension (arXiv:1910.07467).

    x [..., D], weight [D]; residual, out and the result have the shape and dtype of x. s is x, or
    x + residual, which is then also stored in `residual`. `out` may be x itself. On a CUDA device x
    is [T, D] or [T, N, D] with a dense last dimension. Raises ValueError on shapes or dtypes that
    disagree.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    for name, other in (("residual", residual), ("out", out)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ValueError(f"{name} {tuple(other.shape)} is not like x {tuple(x.shape)}")
    if backend.on_triton(x):
        from .cuda import rms_norm as kernel

        out = x.new_empty(x.shape) if out is None else out
        kernel.rms_norm(x, weight, eps, residual, out)
        return out
    if residual is not None:
        x = residual.add_(x)
    if x.dtype == torch.float32:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        # Models were trained with the norm rounded before the weight is applied.
        y = F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight
    return y if out is None else out.copy_(y)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    s = x.float() if residual is None else x.float() + residual.float()
    return s / (s.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.float()
