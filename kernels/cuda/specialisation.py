"""Specialisation: the types and constants that a kernel is compiled for, without a device.

Every kernel module lists those that models use; bench/kernel_resources.py compiles them and reads
their registers and shared memory.
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
    # argument -> "*bf16", "i32", "i64", "fp32", ... or "constexpr"; "i32:16": a multiple of 16,
    # which allows wide loads
    signature: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    pipelined: bool = False  # its loops must prefetch the tiles of later iterations


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and arguments, to run or to compile ahead of time."""

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
        """The launch's specialisation. Only types count: tensors may be on device `meta`."""
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
