"""Triton kernels: what the wrappers beside this folder run when tensors are on a CUDA device."""
