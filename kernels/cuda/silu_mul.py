"""The gated activation of the MLP on a CUDA device. Launched by kernels/silu_mul.py."""

import torch
import triton
import triton.language as tl

from .specialisation import Specialisation

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _silu_mul_kernel(
    gate_up,
    out,
    gate_up_stride,  # elements from one token to the next
    out_stride,
    size,  # I: columns of `out`
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    row = gate_up + token * gate_up_stride
    gate = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + size + columns, mask=inside, other=0.0).to(tl.float32)
    # The activation is rounded before it is multiplied, as the models were trained.
    activation = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    value = activation * up
    tl.store(out + token * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, I] = silu(first half) * second half of gate_up [T, 2 I]; last dimensions dense."""
    tokens, size = out.shape
    if tokens == 0:
        return
    _silu_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )


def specialisations() -> list[Specialisation]:
    return [
        Specialisation(
            f"silu_mul {dtype}",
            _silu_mul_kernel,
            {
                "gate_up": f"*{dtype}",
                "out": f"*{dtype}",
                "gate_up_stride": "i32:16",
                "out_stride": "i32:16",
                "size": "i32:16",
                "BLOCK": "constexpr",
            },
            {"BLOCK": _BLOCK},
            _NUM_WARPS,
            num_stages=1,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
