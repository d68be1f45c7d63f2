"""The one door to DTensor's private sharding-rule registries (torch 2.13).

Two registries are read, neither needs a process group:

    op_single_dim_strategy_funcs   rules for one mesh axis, with a placeholder for "sharded here"
    op_strategy_funcs              rules for a whole mesh; evaluated here on a mesh of one axis of size 1, so that no
                                   rule is hidden because a dim of the example does not divide

Only `Replicate`, `Shard` and the sum `Partial` leave this file. Rules that need another partial (avg, max, masked) or
a strided shard are dropped: they cannot be written as R, S<dim>, P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

from hpsearch.capture.op_facts import OpFacts, TensorFacts
from hpsearch.graph import Rule

COUNTS = {"single-axis": 1014, "mesh-wide": 158}
"""Entries of the two registries in torch 2.13.0 once this file is imported; a test compares."""


def registries() -> dict[str, dict[Any, Callable[..., Any]]]:
    """The two registries, operator overload → rule function."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return {
        "single-axis": propagator.op_single_dim_strategy_funcs,  # type: ignore[dict-item]
        "mesh-wide": propagator.op_strategy_funcs,
    }


def source_of(target: Any) -> str | None:
    """`single-axis` or `mesh-wide`, whichever registry knows the operator first; None when neither does."""
    return next((name for name, registry in registries().items() if target in registry), None)


def registry_rules(facts: OpFacts) -> tuple[Rule, ...]:
    """DTensor's rules for this op on one mesh axis, in its own order, unchecked.

    Entries for outputs that do not exist (masked off) are left out. Raises KeyError if no registry knows the op.
    """
    source = source_of(facts.target)
    if source == "single-axis":
        return tuple(_single_axis(facts))
    if source == "mesh-wide":
        return tuple(_mesh_wide(facts))
    raise KeyError(str(facts.target))


def _text(placement: Any) -> str | None:
    """R, S<dim> or P; None for what these letters cannot say."""
    if isinstance(placement, _ShardingPlaceholder) or type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "P"
    return None


def _rule(inputs: Sequence[Any], outputs: Sequence[Any]) -> Rule | None:
    ins, outs = [_text(p) for p in inputs], [_text(p) for p in outputs]
    if None in ins or None in outs:
        return None
    return tuple(t for t in ins if t is not None), tuple(t for t in outs if t is not None)


def _meta(tensor: TensorFacts) -> TensorMeta:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    return TensorMeta(torch.Size(tensor.shape), tuple(reversed(strides)), tensor.dtype)


def _single_axis(facts: OpFacts) -> Iterator[Rule]:
    args, kwargs = facts.mapped(_meta)
    found = registries()["single-axis"][facts.target](facts.target, args, kwargs)
    slots = facts.output_slots
    for entry in found:
        outputs = [p for p, slot in zip(entry, slots, strict=False) if slot is not None]
        inputs = entry[len(slots) :]
        rule = _rule(inputs, outputs)
        if rule is not None and len(inputs) == len(facts.inputs):
            yield rule


@cache
def _mesh() -> DeviceMesh:
    """One axis of size 1, without a process group: it only carries rules."""
    return DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)


def _strategy(tensor: TensorFacts) -> OpStrategy:
    """Every placement the tensor can have, as DTensor wants its inputs. A dim of size 1 cannot be cut."""
    placements = [Replicate(), *(Shard(d) for d, size in enumerate(tensor.shape) if size != 1), Partial("sum")]
    meta = _meta(tensor)
    return OpStrategy([OpSpec(DTensorSpec(_mesh(), (p,), tensor_meta=meta)) for p in placements])


def _mesh_wide(facts: OpFacts) -> Iterator[Rule]:
    args, kwargs = facts.mapped(_strategy)
    wrapped = tuple(TupleStrategy(a) if _is_strategy_list(a) else a for a in args)
    strategy = registries()["mesh-wide"][facts.target](OpSchema(facts.target, wrapped, kwargs))
    if not isinstance(strategy, OpStrategy):
        yield from _children(strategy)
        return
    for spec in strategy.strategies:
        outputs = [s.placements[0] for s in _specs(spec.output_specs)]
        outputs *= len(facts.outputs) if len(outputs) == 1 else 1
        inputs = [s.placements[0] for s in spec.input_specs] if spec.input_specs is not None else outputs[:1]
        rule = _rule(inputs, outputs)
        if rule is not None and len(inputs) == len(facts.inputs) and len(outputs) == len(facts.outputs):
            yield rule


def _children(strategy: TupleStrategy) -> Iterator[Rule]:
    """List-valued results (split, unbind): the i-th strategy of every child belongs to the same input placement."""
    for specs in zip(*(child.strategies for child in strategy.children), strict=True):
        inputs = [s.placements[0] for s in specs[0].input_specs or (specs[0].output_spec,)]
        rule = _rule(inputs, [spec.output_spec.placements[0] for spec in specs])
        if rule is not None:
            yield rule


def _specs(output: Any) -> list[DTensorSpec]:
    return [s for s in (output if isinstance(output, (tuple, list)) else (output,)) if s is not None]


def _is_strategy_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and all(isinstance(a, OpStrategy) for a in arg)
