"""RMSNorm, optionally fused with the residual add before it. Called by the models."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """y = s / sqrt(mean(s^2) + eps) * weight over the last dimension (arXiv:1910.07467).

    x [..., D], weight [D], result like x. s is x, or x + residual: then the sum is also written
    into `residual`, which has the shape and type of x. Raises ValueError on shapes that disagree.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"residual {tuple(residual.shape)} is not like x {tuple(x.shape)}")
        x = residual.add_(x)
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # The norm is rounded before the weight is applied, as the models were trained.
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    s = x.float() if residual is None else x.float() + residual.float()
    return s / (s.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.float()
