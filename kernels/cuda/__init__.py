"""Triton kernels, which the wrappers in kernels/ launch for tensors on a CUDA device."""
