"""Layers of a decoder: linear map, RMSNorm, and rotary embedding tables with their scalings.

Used by the model files. A layer owns its parameters as plain tensors without gradient; the loader
fills them. Checkpoint names and files must not enter.
"""

import math

import torch
import torch.nn.functional as F

from ...kernels.rms_norm import rms_norm
from .config import RopeSpec
from .parallel import WHOLE, Shard

# oneDNN picks a packed layout for about this many rows; it measured well from 1 to 512.
_PACK_BATCH_HINT = 32
_PACK_MIN_ELEMENTS = 1 << 16


class Linear:
    """y = x W^T + b. x [T, in], W [out, in], b [out] or None.

    `pack` replaces W by a copy in oneDNN's layout: F.linear would convert it in every call, which
    halves the speed of small batches.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, shard: Shard = WHOLE
    ) -> None:
        """With several ranks, x and W are this rank's part of the inputs, and y is summed."""
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._shard = shard
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        self._shard.sum(y)
        return y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return y

    def pack(self) -> None:
        """Lay the weight out for speed. Call once, when it is final; drops the plain weight."""
        if self._shard.rank:
            self.bias = None  # the sum over ranks must add it once
        weight = self.weight
        if weight is None or weight.numel() < _PACK_MIN_ELEMENTS or not _can_pack(weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_BATCH_HINT)
        self.weight = None


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch build can pack `weight`; the private operators may be missing."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise x, or x + residual, which is then also stored in `residual`."""
        return rms_norm(x, self.weight, self._eps, residual)

    def in_place(self, x: torch.Tensor) -> None:
        rms_norm(x, self.weight, self._eps, out=x)


def cos_sin_table(rope: RopeSpec, head_dim: int, positions: int, device: str) -> torch.Tensor:
    """Compute cosines, then sines, of each position's angles: [positions, head_dim] float32."""
    if device == "meta":
        return torch.empty(positions, head_dim, device=device)  # only shapes are needed
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)
    return table.to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Compute radians per position of each rotary pair, [head_dim // 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "freq_factors":
            return plain / torch.tensor(rope.factors)
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, head_dim)


def _llama3(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Apply Llama 3.1 scaling: divide low frequencies, keep high ones, interpolate between."""
    turns = rope.original_context * plain / (2 * math.pi)  # over the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(plain: torch.Tensor, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Apply YaRN (arXiv:2309.00071, 3.2): interpolate over pairs from beta_fast to beta_slow."""

    def dimension(turns: float) -> float:
        """Return the (fractional) pair that makes `turns` turns in the original context."""
        wave = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return stretched * plain / rope.factor + (1 - stretched) * plain
