"""What a kernel is compiled for: the variants that models use, for compilation without a device.

Every kernel module lists its own; bench/kernel_resources.py compiles them and reads what they need.
"""

from dataclasses import dataclass

import torch
import triton

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
}


@dataclass(frozen=True, slots=True)
class Specialisation:
    name: str
    kernel: triton.JITFunction
    # argument -> "*bf16", "i32", "i64", "fp32", ... or "constexpr"; "i32:16" of a number that 16
    # divides, which widens loads
    signature: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    pipelined: bool = False  # its loops must fetch tiles of later iterations ahead of time


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with all it is launched with, so that just that can be compiled ahead of time."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, torch.Tensor | int | float]
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    pipelined: bool = False

    def run(self) -> None:
        self.kernel[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def specialisation(self, name: str) -> Specialisation:
        """Its tensors may be of the device `meta`: only types count."""
        signature = {argument: _type(value) for argument, value in self.arguments.items()}
        signature |= dict.fromkeys(self.constants, "constexpr")
        return Specialisation(
            name,
            self.kernel,
            signature,
            self.constants,
            self.num_warps,
            self.num_stages,
            self.pipelined,
        )


def _type(value: torch.Tensor | int | float) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32:16" if value % 16 == 0 else "i32"
