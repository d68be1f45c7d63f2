"""The stored model: DTensor parameters and plain buffers in a tree of empty modules that has the model's own FQNs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hpsearch.errors import InternalError


class Shell(nn.Module):
    """A module of the original model without its code; only its tensors stand here."""

    def forward(self, *args: object) -> None:
        raise InternalError("module shell", "parts of a parallel model cannot be called alone", "Call the whole model.")


def hang(root: nn.Module, fqn: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Put `tensor` under `root` at its FQN: a Parameter as parameter, anything else as buffer."""
    *path, name = fqn.split(".")
    for part in path:
        # Written into the table itself: a model may name a child like one of the root's own methods.
        root = root._modules.setdefault(part, Shell())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        root._parameters[name] = tensor
    else:
        root._buffers[name] = tensor
        if not persistent:
            root._non_persistent_buffers_set.add(name)


def persistent_buffers(model: nn.Module) -> set[str]:
    """FQNs of the buffers that the plain model's state_dict holds."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return set(model.state_dict(keep_vars=True)) - parameters


def names_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """First FQN of each tensor, by identity."""
    found: dict[int, str] = {}
    for name, tensor in tensors:
        found.setdefault(id(tensor), name)
    return found
