"""Choose the implementation of an op for a tensor. Called by the op wrappers in kernels/."""

import torch


def on_triton(x: torch.Tensor) -> bool:
    """Whether the Triton kernel serves `x`. Tests patch this to interpret kernels on a CPU."""
    return x.is_cuda
