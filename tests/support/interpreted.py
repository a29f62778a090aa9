"""Wrappers of kernels, made to take CPU tensors for tensors of a device: then Triton's interpreter
runs the kernels, and what wrappers allocate for them is poisoned first."""

import pytest
import torch


def as_if_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: _poisoned(empty(*size, **how)))
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda like, *size, **how: _poisoned(new_empty(like, *size, **how)),
    )


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 20))
