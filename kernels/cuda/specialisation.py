"""What a kernel is compiled for: the variants that models use, for compilation without a device.

Every kernel module lists its own; bench/kernel_resources.py compiles them and reads what they need.
"""

from dataclasses import dataclass

import triton


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
