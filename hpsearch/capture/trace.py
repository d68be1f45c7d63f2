"""From a fake twin and a batch to joint graphs: the outer graph, and one graph for each block class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hpsearch.capture.aot import Joint, export_joint
from hpsearch.capture.decompose import decompositions
from hpsearch.capture.fold import Folded, fold
from hpsearch.capture.ops import CallForm, TensorForm, calls_known
from hpsearch.capture.probe import CallRecord, probing
from hpsearch.capture.scope import recording
from hpsearch.errors import CaptureError

Step = Callable[[nn.Module, list[torch.Tensor]], torch.Tensor]
"""The training step: (module, tensor leaves of the batch) → scalar loss."""


@dataclass
class Instance:
    """A folded call on its way through the outer trace."""

    folded: Folded
    needs: tuple[bool, ...] = ()
    """Which inputs want a gradient."""
    differentiated: tuple[bool, ...] = ()
    """Which results were differentiated; found when the outer backward runs."""
    pattern: Instance | None = None
    """The call of the same class that runs when a trace is repeated at another row count."""

    @property
    def record(self) -> CallRecord:
        return self.folded.record

    def form(self) -> CallForm:
        grads = (t for t, need in zip(self.record.tensors, self.needs, strict=True) if need)
        return CallForm(tuple(map(_form, self.record.returned)), tuple(_form(t, contiguous=True) for t in grads))


@dataclass
class Traced:
    """Joint graphs at one row count."""

    outer: Joint
    folded: list[Instance]
    blocks: dict[str, Joint] = field(default_factory=dict)
    needs: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    """For each class, which inputs want a gradient."""
    first: dict[str, CallRecord] = field(default_factory=dict)
    """For each class, the call it was traced from."""
    instances: list[tuple[str, str]] = field(default_factory=list)
    """(class, FQN prefix) of each call."""


def trace(twin: nn.Module, leaves: list[torch.Tensor], step: Step, like: Traced | None = None) -> Traced:
    """Traces one training step; all tensors are fake, and the fake mode is active.

    `like` is a trace of the same step at another row count: its fold is taken over, and of each class only the first
    call runs. Raises CaptureError where there is no loss to differentiate.
    """
    instances = _probe(twin, leaves, step) if like is None else _replay(twin, leaves, step, like.folded)
    with calls_known([i.form() for i in instances]), _in_place(twin, instances, _Stub), recording(twin):
        traced = Traced(export_joint(_Outer(twin, step), tuple(leaves), decompositions()), instances)
    names = _class_names(instances)
    for instance, name in zip(instances, names, strict=True):
        traced.instances.append((name, instance.record.prefix))
        if name not in traced.blocks:
            with recording(instance.record.module):
                traced.blocks[name] = _trace_block(instance)
            traced.needs[name], traced.first[name] = instance.needs, instance.record
    return traced


def _probe(twin: nn.Module, leaves: list[torch.Tensor], step: Step) -> list[Instance]:
    with probing(twin) as probe:
        loss = step(twin, leaves)
    _check_loss(loss)
    return [Instance(f, tuple(t.requires_grad for t in f.record.tensors)) for f in fold(probe, twin)]


def _replay(twin: nn.Module, leaves: list[torch.Tensor], step: Step, folded: list[Instance]) -> list[Instance]:
    """The same calls with tensors of the sizes that `leaves` lead to."""
    fresh = [Instance(Folded(CallRecord(i.record.module, i.record.prefix), i.folded.key)) for i in folded]
    first: dict[Any, Instance] = {}
    for instance in fresh:
        instance.pattern = first.setdefault(instance.folded.key, instance)
    with _in_place(twin, fresh, _Replayed):
        step(twin, leaves)
    return fresh


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        found += "" if getattr(loss, "requires_grad", True) else " without gradient"
        raise CaptureError(
            "loss", f"expected a scalar that depends on trainable parameters, but found {found}", "Check the loss."
        )


def _form(tensor: torch.Tensor, contiguous: bool = False) -> TensorForm:
    if contiguous:
        strides, step = [0] * tensor.dim(), 1
        for dim in reversed(range(tensor.dim())):
            strides[dim], step = step, step * tensor.shape[dim]
        return tensor.shape, tuple(strides), tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype


class _Outer(nn.Module):
    """The whole step, with blocks stubbed. `anchor` makes a block differentiable whose inputs need no gradient."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model = model
        self.anchor = nn.Parameter(torch.empty(()))
        self.step = step

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor]:
        _Stub.anchor = self.anchor
        return (self.step(self.model, list(leaves)),)


class _BlockCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, instance: Instance, call: int, _anchor: Any, *inputs: Any) -> Any:
        ctx.instance, ctx.call = instance, call
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.ops.hpsearch.block(list(inputs), call))
        recorded = instance.record.returned
        ctx.mark_non_differentiable(*(o for o, r in zip(outputs, recorded, strict=True) if not r.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        instance: Instance = ctx.instance
        instance.differentiated = tuple(g is not None for g in grads)
        tangents = [g.contiguous() for g in grads if g is not None]
        found = iter(torch.ops.hpsearch.block_backward(tangents, ctx.call))
        anchor = None if any(instance.needs) else next(found)
        return None, None, anchor, *(next(found) if need else None for need in instance.needs)


class _StandIn(nn.Module):
    """Stands where a block stood, and has its attributes."""

    def __init__(self, instance: Instance, call: int) -> None:
        super().__init__()
        object.__setattr__(self, "instance", instance)
        object.__setattr__(self, "call", call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.instance.record.module, name)


class _Stub(_StandIn):
    """Calls `hpsearch::block` instead."""

    anchor: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record = self.instance.record
        given = pytree.tree_leaves((args, kwargs))
        actual = {id(old): new for old, new in zip(record.leaves, given, strict=True) if isinstance(old, torch.Tensor)}
        inputs = [actual[id(t)] for t in record.tensors]
        outputs = _BlockCall.apply(self.instance, self.call, _Stub.anchor, *inputs)
        actual |= {id(old): new for old, new in zip(record.returned, outputs, strict=True)}
        leaves = [actual[id(x)] if isinstance(x, torch.Tensor) else x for x in record.out_leaves]
        return pytree.tree_unflatten(leaves, record.out_spec)


class _Replayed(_StandIn):
    """Records the call; runs it only when no call of its class ran before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record, pattern = self.instance.record, self.instance.pattern.record
        record.leaves, record.in_spec = pytree.tree_flatten((args, kwargs))
        self.instance.needs = tuple(t.requires_grad for t in record.tensors)
        if pattern is record:
            result = record.module(*args, **kwargs)
        else:
            actual = {id(old): new for old, new in zip(pattern.tensors, record.tensors, strict=True)}
            actual |= {id(t): torch.empty_like(t).requires_grad_(t.requires_grad) for t in pattern.returned}
            leaves = [actual[id(x)] if isinstance(x, torch.Tensor) else x for x in pattern.out_leaves]
            result = pytree.tree_unflatten(leaves, pattern.out_spec)
        record.out_leaves, record.out_spec = pytree.tree_flatten(result)
        return result


@contextmanager
def _in_place(twin: nn.Module, instances: list[Instance], kind: type[_StandIn]) -> Iterator[None]:
    """While open, stand-ins stand for the folded modules of `twin`."""
    places = []
    for call, instance in enumerate(instances):
        parent, _, name = instance.record.prefix.rpartition(".")
        place = twin.get_submodule(parent)._modules
        places.append((place, name, place[name]))
        place[name] = kind(instance, call)
    try:
        yield
    finally:
        for place, name, module in places:
            place[name] = module


def _class_names(instances: list[Instance]) -> list[str]:
    """A name for each call's class: the module's type, with `#2`, `#3` for further classes of the same type."""
    found: dict[Any, str] = {}
    used: dict[str, int] = {}
    for instance in instances:
        key = (instance.folded.key, instance.differentiated)
        if key not in found:
            kind = type(instance.record.module).__name__
            used[kind] = used.get(kind, 0) + 1
            found[key] = kind if used[kind] == 1 else f"{kind}#{used[kind]}"
    return [found[instance.folded.key, instance.differentiated] for instance in instances]


class _Block(nn.Module):
    """A block as a function of its distinct tensor arguments; returns its distinct new tensors."""

    def __init__(self, instance: Instance) -> None:
        super().__init__()
        self.block = instance.record.module
        self.instance = instance

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        record = self.instance.record
        actual = {id(old): new for old, new in zip(record.tensors, inputs, strict=True)}
        leaves = [actual[id(x)] if isinstance(x, torch.Tensor) else x for x in record.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, record.in_spec)
        new = pytree.tree_leaves(self.block(*args, **kwargs))
        made = {id(old): tensor for old, tensor in zip(record.out_leaves, new, strict=True)}
        outputs = [made[id(t)] for t in record.returned]
        marks = self.instance.differentiated or (False,) * len(outputs)
        storages = {t.untyped_storage()._cdata for t in inputs}
        for index, (tensor, mark) in enumerate(zip(outputs, marks, strict=True)):
            storage = tensor.untyped_storage()._cdata
            if storage in storages:  # a view: torch would rebuild it outside the graph, where no gradient passes
                outputs[index] = tensor.clone()
            storages.add(storage)
            if not mark:
                outputs[index] = outputs[index].detach()
        return tuple(outputs)


def _trace_block(instance: Instance) -> Joint:
    args = tuple(
        t.detach().requires_grad_(need) for t, need in zip(instance.record.tensors, instance.needs, strict=True)
    )
    return export_joint(_Block(instance), args, decompositions())
