"""`Batch`: the tensors of a training step, by name, and how their sizes follow the rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hpsearch.errors import CaptureError

Loss = Callable[[Any, Any], torch.Tensor]
"""(outputs of the model, batch) → scalar."""

COUNT = "num_items_in_batch"
"""The input by which a loss becomes Σ / count, and adds up exactly over micro-batches and ranks."""


@dataclass(frozen=True)
class Leaf:
    name: str
    fixed: tuple[int, ...]
    per_row: tuple[int, ...]
    dtype: torch.dtype

    def fake(self, rows: int) -> torch.Tensor:
        return torch.empty([f + p * rows for f, p in zip(self.fixed, self.per_row, strict=True)], dtype=self.dtype)


@dataclass(frozen=True)
class Batch:
    """The flattened batch; `values` has a `Leaf` for each tensor and the value of every other leaf."""

    values: tuple[Any, ...]
    spec: pytree.TreeSpec
    rows: int

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(v for v in self.values if isinstance(v, Leaf))

    @staticmethod
    def of(batch: Any, compute: torch.dtype, per_row: Mapping[str, int] | None = None) -> Batch:
        """From a mapping (keyword arguments) or a tuple or list (positional arguments), nested or not.

        The rows are dim 0 of the first tensor that has one; a tensor with as many in dim 0 follows the rows, any other
        is fixed, unless `per_row` names it and says how many of its dim 0 belong to a row. Floating tensors are taken
        in the compute dtype, as the recipe says. Raises CaptureError for a batch without tensors.
        """
        if not isinstance(batch, (Mapping, tuple, list)):
            raise CaptureError("batch", f"expected a mapping or a tuple, but found {type(batch).__name__}", "Wrap it.")
        batch = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        paths, spec = pytree.tree_flatten_with_path(batch)
        tensors = [leaf for _, leaf in paths if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors:
            raise CaptureError("batch", "expected at least one tensor with rows, but found none", "Pass tensors.")
        rows = tensors[0].shape[0]
        values = [
            _leaf(_path(path), leaf, rows, compute, per_row or {}) if isinstance(leaf, torch.Tensor) else leaf
            for path, leaf in paths
        ]
        return Batch(tuple(values), spec, rows)

    def fakes(self, rows: int) -> list[torch.Tensor]:
        return [leaf.fake(rows) for leaf in self.leaves]

    def unflatten(self, tensors: list[torch.Tensor]) -> Any:
        """The batch with these tensors in place of the leaves."""
        found = iter(tensors)
        return pytree.tree_unflatten([next(found) if isinstance(v, Leaf) else v for v in self.values], self.spec)

    def flatten(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch of the same structure, in the order of the graph's inputs. Raises CaptureError."""
        batch = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        leaves, spec = pytree.tree_flatten(batch)
        if spec != self.spec:
            raise CaptureError("batch", f"expected {self.spec}, but found {spec}", "Pass the batch that was captured.")
        return [leaf for leaf, value in zip(leaves, self.values, strict=True) if isinstance(value, Leaf)]

    def step(self, loss: Loss | None) -> Callable[[nn.Module, list[torch.Tensor]], torch.Tensor]:
        """The training step on tensor leaves: call the model, find or compute the loss."""

        def run(model: nn.Module, tensors: list[torch.Tensor]) -> torch.Tensor:
            batch = self.unflatten(tensors)
            args, kwargs = model_arguments(model, batch, only_accepted=loss is not None)
            outputs = model(*args, **kwargs)
            return own_loss(outputs) if loss is None else loss(outputs, batch)

        return run


def _path(path: Any) -> str:
    keys = [getattr(p, "key", getattr(p, "idx", getattr(p, "name", ""))) for p in path]
    text = ".".join(str(k) for k in keys)
    return text if text[:1].isalpha() else f"arg{text}"


def _leaf(name: str, tensor: torch.Tensor, rows: int, compute: torch.dtype, per_row: Mapping[str, int]) -> Leaf:
    dtype = compute if tensor.is_floating_point() else tensor.dtype
    shape = tuple(tensor.shape)
    packed = per_row.get(name, 1 if shape and shape[0] == rows else 0)
    if not packed:
        return Leaf(name, shape, (0,) * len(shape), dtype)
    return Leaf(name, (0, *shape[1:]), (packed, *(0,) * (len(shape) - 1)), dtype)


def model_arguments(model: nn.Module, batch: Any, only_accepted: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the model. With a loss function of its own, the model gets what its forward accepts.

    For a mapping those are the entries named in forward's signature; for a tuple the first n, n positional parameters.
    """
    is_mapping = isinstance(batch, Mapping)
    if only_accepted:
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {p.kind for p in parameters}
        if is_mapping and inspect.Parameter.VAR_KEYWORD not in kinds:
            batch = {name: value for name, value in batch.items() if name in {p.name for p in parameters}}
        elif not is_mapping and inspect.Parameter.VAR_POSITIONAL not in kinds:
            named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            batch = batch[: sum(p.kind in named for p in parameters)]
    return ((), dict(batch)) if is_mapping else (tuple(batch), {})


def own_loss(outputs: Any) -> Any:
    """The loss that a model returned: its `loss`, or the outputs themselves when they are one tensor."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None:
        raise CaptureError(
            "loss",
            f"expected a scalar, or outputs with `loss`, but the model returned {type(outputs).__name__} without one",
            "Put labels into the batch, or pass loss=function(outputs, batch).",
        )
    return found
