"""`OpFacts`: what a sharding rule may depend on: the operator, the shapes and dtypes of its tensors, its other args."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hpsearch.errors import InternalError


@dataclass(frozen=True)
class TensorFacts:
    """Global shape and dtype of a tensor; strides are not part of it: no rule may depend on them."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class OpFacts:
    target: Any
    """Operator overload."""
    args: tuple[Any, ...]
    """As in the fx node, with `TensorFacts` in place of tensors."""
    kwargs: dict[str, Any]
    inputs: tuple[TensorFacts, ...]
    """Tensor arguments in order, lists flattened, None left out; then tensor keyword arguments."""
    output_slots: tuple[TensorFacts | None, ...]
    """One for each element of the flattened result; None where the op returns no tensor there."""

    @property
    def outputs(self) -> tuple[TensorFacts, ...]:
        """The tensors that exist in the result, in order."""
        return tuple(slot for slot in self.output_slots if slot is not None)

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable; equal keys have equal rules."""
        return self.target, _frozen(self.args), _frozen(self.kwargs), self.output_slots

    def mapped(self, change: Callable[[TensorFacts], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs with `change` applied to each tensor."""
        return _map(self.args, change), _map(self.kwargs, change)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument called `name` in the operator's schema, wherever it was passed."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @staticmethod
    def of(node: fx.Node) -> OpFacts:
        """The facts of a normalised `call_function` node; InternalError for anything else."""
        if node.op != "call_function" or "val" not in node.meta:
            raise InternalError(f"node {node.name}", f"expected a call_function with meta['val'], but found {node.op}")
        args, kwargs = _of_nodes(node.args), _of_nodes(node.kwargs)
        inputs = tuple(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, TensorFacts))
        return OpFacts(node.target, args, kwargs, inputs, output_slots(node.meta["val"]))


def output_slots(value: Any) -> tuple[TensorFacts | None, ...]:
    """The flattened result of an op, with None for what is not a tensor."""
    leaves = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_facts(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def _facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(tuple(int(size) for size in tensor.shape), tensor.dtype)


def _of_nodes(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        value = arg.meta["val"]
        return _facts(value) if isinstance(value, torch.Tensor) else value
    if isinstance(arg, (list, tuple)):
        return tuple(_of_nodes(a) for a in arg) if isinstance(arg, tuple) else [_of_nodes(a) for a in arg]
    if isinstance(arg, dict):
        return {key: _of_nodes(a) for key, a in arg.items()}
    return arg


def _map(arg: Any, change: Callable[[TensorFacts], Any]) -> Any:
    if isinstance(arg, TensorFacts):
        return change(arg)
    if isinstance(arg, list):
        return [_map(a, change) for a in arg]
    if isinstance(arg, tuple):
        return tuple(_map(a, change) for a in arg)
    if isinstance(arg, dict):
        return {key: _map(a, change) for key, a in arg.items()}
    return arg


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def _frozen(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(a) for a in arg)
    if isinstance(arg, dict):
        return tuple((key, _frozen(a)) for key, a in arg.items())
    # 1, 1.0 and True are equal keys but different arguments
    return arg if isinstance(arg, TensorFacts) else (type(arg).__name__, arg)
