"""`rules_for(node)`: every way to run an op on the pieces of one mesh axis.

A rule is ((placements of the tensor inputs), (placements of the tensor outputs)), as text. Inputs are in argument
order, lists flattened, None left out; outputs are the tensors that exist in the flattened result. A rule holds for any
axis size that divides every dim it cuts, inputs and outputs alike; who uses it checks that by shape.

Where rules come from, in this order: our own table where DTensor has none or cannot be used (`rule_table`, each entry
with its reason), DTensor's single-axis registry, DTensor's mesh-wide registry on an axis of size 1. An op that none of
them knows may only be replicated, and only where that is cheap (integers, booleans, single elements); else it is an
`UnsupportedOpError`: a silent replicate would be a silent slowdown.

What a rule does not say: random masks (dropout) are other numbers on other cuts, equal in distribution only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from hpsearch.capture.dtensor_registry import registry_rules, source_of
from hpsearch.capture.op_facts import OpFacts, TensorFacts
from hpsearch.capture.rule_table import MORE, OWN
from hpsearch.errors import UnsupportedOpError
from hpsearch.graph import Rule

_found: dict[object, tuple[Rule, ...]] = {}
"""Rules by `OpFacts.key`; they depend on nothing else."""


def rules_for(node: fx.Node) -> tuple[Rule, ...]:
    """All rules of a normalised node, the all-replicate one first. Raises UnsupportedOpError (see above)."""
    facts = OpFacts.of(node)
    key = facts.key
    if key not in _found:
        _found[key] = find_rules(facts)
    return _found[key]


def rule_source(node: fx.Node) -> str:
    """`own`, `single-axis`, `mesh-wide`, or `none`: replicated because nothing better is known."""
    return _source(OpFacts.of(node))


def _source(facts: OpFacts) -> str:
    if facts.name in OWN:
        return "own"
    return source_of(facts.target) or "none"


def find_rules(facts: OpFacts) -> tuple[Rule, ...]:
    """`rules_for` by the facts of the op, not cached."""
    source = _source(facts)
    found: Iterable[Rule] = ()
    if source == "own":
        found = OWN[facts.name][0](facts)
    elif source != "none":
        found = (*registry_rules(facts), *MORE.get(facts.name, ()))
    elif not all(_is_cheap(t) for t in (*facts.inputs, *facts.outputs)):
        raise UnsupportedOpError(
            f"operator {facts.name}",
            f"no sharding rule is known, and replicating float tensors {_shapes(facts)} would be a silent slowdown",
            "Add a rule to hpsearch/capture/rule_table.py.",
        )
    replicated = ("R",) * len(facts.inputs), ("R",) * len(facts.outputs)
    return tuple(dict.fromkeys([replicated, *(rule for rule in found if _is_possible(rule, facts))]))


def _is_cheap(tensor: TensorFacts) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or all(size == 1 for size in tensor.shape)


def _is_possible(rule: Rule, facts: OpFacts) -> bool:
    """No cut of a dim that is absent or has size 1, no sum of booleans, no sum over a cast that rounds."""
    if "P" in rule[0] and facts.name in _CASTS and _rounds(facts.inputs[0].dtype, facts.outputs[0].dtype):
        return False
    pairs = zip((*rule[0], *rule[1]), (*facts.inputs, *facts.outputs), strict=True)
    for text, tensor in pairs:
        if text[0] == "S" and (int(text[1:]) >= len(tensor.shape) or tensor.shape[int(text[1:])] == 1):
            return False
        if text == "P" and tensor.dtype == torch.bool:
            return False
    return True


_CASTS = ("aten._to_copy.default",)


def _rounds(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether addends lose more in this cast than their sum would: reduce first, then cast down."""
    if target.is_floating_point:
        return source.is_floating_point and target.itemsize < source.itemsize
    return source.is_floating_point or target.itemsize < source.itemsize


def _shapes(facts: OpFacts) -> str:
    return ", ".join(str(list(t.shape)) for t in facts.inputs if not _is_cheap(t)) or "of the result"
