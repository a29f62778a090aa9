"""Which implementation of an op serves a tensor. Asked by the wrappers of this folder."""

import torch


def on_triton(x: torch.Tensor) -> bool:
    """The Triton kernel does. Tests say so of tensors on a CPU, where kernels are interpreted."""
    return x.is_cuda
