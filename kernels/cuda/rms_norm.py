"""RMSNorm on a CUDA device, with or without the residual add. Launched by kernels/rms_norm.py."""

import torch
import triton
import triton.language as tl

from .specialisation import Specialisation

_ROWS_BELOW = 512  # elements; shorter rows share a program
_TILE = 1024  # elements of a program of several rows


@triton.jit
def _rms_norm_kernel(
    x,
    residual,  # read and written if HAS_RESIDUAL
    weight,
    out,
    eps,
    heads,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    residual_head_stride,
    out_token_stride,
    out_head_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, >= SIZE
    ROWS: tl.constexpr,  # heads of one token per program
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < SIZE)
    place = x + token * x_token_stride + head * x_head_stride + column
    s = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + token * residual_token_stride + head * residual_head_stride + column
        s += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        s = rounded.to(tl.float32)
    mean = tl.sum(s * s, axis=1)[:, None] / SIZE
    # The norm is rounded before the weight is applied, as the models were trained.
    norm = (s * tl.rsqrt(mean + eps)).to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    place = out + token * out_token_stride + head * out_head_stride + column
    tl.store(place, (norm * factor).to(out.dtype.element_ty), mask=inside)


def _tile(size: int) -> tuple[int, int, int]:
    """BLOCK, ROWS and warps for rows of this many elements."""
    block = triton.next_power_of_2(size)
    rows = _TILE // block if block < _ROWS_BELOW else 1
    return block, rows, min(max(block * rows // 512, 2), 16)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write the result of kernels/rms_norm.py to `out`, maybe x; x [T, D] or [T, N, D], D dense."""
    if x.numel() == 0:
        return
    # [T, D] is one head per token. Without a residual, x fills its argument, which is not accessed.
    views = [
        tensor if tensor.dim() == 3 else tensor[:, None]
        for tensor in (x, x if residual is None else residual, out)
    ]
    tokens, heads, size = views[0].shape
    block, rows, warps = _tile(size)
    _rms_norm_kernel[(tokens, triton.cdiv(heads, rows))](
        views[0],
        views[1],
        weight,
        views[2],
        eps,
        heads,
        *(stride for view in views for stride in view.stride()[:2]),
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        num_warps=warps,
    )


def specialisations() -> list[Specialisation]:
    """The hidden states of SmolLM2-135M and Llama-3.1-8B, and the heads of Qwen3."""
    return [
        _specialisation(dtype, size, has_residual)
        for dtype in ("bf16", "fp16")
        for size, has_residual in (
            (576, False),
            (576, True),
            (4096, False),
            (4096, True),
            (128, False),
        )
    ]


def _specialisation(dtype: str, size: int, has_residual: bool) -> Specialisation:
    block, rows, warps = _tile(size)
    strides = [
        f"{name}_{of}_stride" for name in ("x", "residual", "out") for of in ("token", "head")
    ]
    constants: dict[str, object] = {
        "SIZE": size,
        "BLOCK": block,
        "ROWS": rows,
        "HAS_RESIDUAL": has_residual,
    }
    return Specialisation(
        f"rms_norm {dtype} {size}{' residual' * has_residual}",
        _rms_norm_kernel,
        dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}")
        | {"eps": "fp32", "heads": "i32"}
        | dict.fromkeys(strides, "i32:16")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        warps,
        num_stages=1,
    )
