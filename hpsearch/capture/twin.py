"""The fake twin: the user's module with every tensor replaced by a fake one, so that nothing real is ever touched."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from hpsearch.errors import CaptureError

COMPUTE_DTYPE = {
    **dict.fromkeys(("bf16", "bf16_grads", "fp8"), torch.bfloat16), "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""Dtype in which floating parameters are used, by recipe."""


def make_twin(model: nn.Module, mode: FakeTensorMode, recipe: str) -> nn.Module:
    """A copy of `model` on fake CPU tensors; floating parameters in the recipe's compute dtype, buffers as they are.

    Tensors kept as plain attributes become buffers of the copy. The user's module is not changed.
    Raises CaptureError for an unknown recipe or a module that cannot be copied.
    """
    if recipe not in COMPUTE_DTYPE:
        raise CaptureError(f"recipe {recipe!r}", f"expected one of {', '.join(COMPUTE_DTYPE)}", "Choose one of them.")
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode, COMPUTE_DTYPE[recipe])
    try:
        twin = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(
            f"module {type(model).__name__}",
            f"expected a module that copy.deepcopy can copy, but it failed: {error}",
            "Keep handles such as locks, files and process groups outside the module.",
        ) from error
    for module in twin.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
    return twin


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for module in model.modules():
        for kept in (module._parameters, module._buffers, vars(module)):
            found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    return found


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, compute: torch.dtype) -> torch.Tensor:
    is_param = isinstance(tensor, nn.Parameter)
    dtype = compute if is_param and tensor.is_floating_point() else tensor.dtype
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_param else fake


def constant_of(tensor: torch.Tensor) -> float | int | bool | None:
    """The number in a one-element tensor that Python code made inside forward; None for any other tensor."""
    value = tensor.constant if isinstance(tensor, FakeTensor) else tensor if type(tensor) is torch.Tensor else None
    if value is None or value.numel() != 1:
        return None
    with unset_fake_temporarily():
        return value.item()
