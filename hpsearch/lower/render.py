"""Arguments of a traced op as Python source."""

from __future__ import annotations

import math
from typing import Any

import torch


class Local(str):
    """The local name of a tensor, standing where the traced graph has a node."""

    __slots__ = ()


def render_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`torch.ops.aten.mm.default(a, b)`; tensors are `Local` names, devices the rank's `device`."""
    words = [render(a) for a in args] + [f"{key}={render(value)}" for key, value in kwargs.items()]
    return f"{render_target(target)}({', '.join(words)})"


FUNCTIONS = {
    "hpsearch.einsum.default": "einsum",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "attention_backward",
}
"""Ops that the program calls as plain functions of ours."""


def render_target(target: Any) -> str:
    """Overloads by their path under torch.ops, a few as functions that the program's header imports."""
    name = str(target)
    return FUNCTIONS.get(name, f"torch.ops.{name}")


def render(value: Any) -> str:
    """Python source that evaluates to `value` in an emitted program."""
    if isinstance(value, Local):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (list, tuple)):
        inside = ", ".join(render(v) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    return repr(value)
