"""From a probe to block classes: which calls are folded, and which class each belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from hpsearch.capture.probe import PLAIN, CallRecord, Dispatched, Probe
from hpsearch.capture.twin import constant_of


@dataclass(frozen=True)
class Folded:
    """A call that the outer graph will not look into, and the key of its class."""

    record: CallRecord
    key: Hashable


def fold(probe: Probe, model: nn.Module) -> tuple[Folded, ...]:
    """The calls to fold, in call order: outermost first, and only classes that are called at least twice.

    Not folded, and traced where they stand: modules called more than once and modules that share a parameter with
    anything outside (the outer graph then adds up their gradients), calls that read tensors nobody passed them, that
    write into an argument, or that hand over objects other than tensors and plain values.
    """
    keys: dict[int, Hashable | None] = {}
    order = list(_walk(probe.calls))
    times = Counter(id(record.module) for record in order)
    registered, used = _registered(model), _used(model, probe.log)
    for record in order:
        alone = times[id(record.module)] == 1 and _owns_its_parameters(record, registered, used)
        keys[id(record)] = _key(record, probe.log) if alone else None
    frontier = list(probe.calls)
    while True:
        count = Counter(keys[id(r)] for r in frontier if keys[id(r)] is not None)
        kept = [r for r in frontier if count[keys[id(r)]] > 1]
        rest = [r for r in frontier if count[keys[id(r)]] <= 1]
        if not any(r.nested for r in rest):
            break
        frontier = kept + [inner for r in rest for inner in r.nested]
    kept.sort(key=lambda r: r.start)
    return tuple(Folded(r, keys[id(r)]) for r in kept)


def _walk(calls: Iterable[CallRecord]) -> Iterable[CallRecord]:
    for record in calls:
        yield record
        yield from _walk(record.nested)


def _registered(model: nn.Module) -> dict[int, int]:
    """How often each parameter is registered in the model."""
    return Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)


def _used(model: nn.Module, log: list[Dispatched]) -> dict[int, tuple[int, int]]:
    """First and last position in the log that reads each parameter."""
    known = {id(p) for p in model.parameters()}
    spans: dict[int, tuple[int, int]] = {}
    for position, entry in enumerate(log):
        for key in {id(t) for t in entry.inputs} & known:
            spans[key] = (spans.get(key, (position, 0))[0], position)
    return spans


def _owns_its_parameters(record: CallRecord, registered: dict[int, int], used: dict[int, tuple[int, int]]) -> bool:
    inside = Counter(id(p) for m in record.module.modules() for p in m._parameters.values() if p is not None)
    spans = (used.get(p, (record.start, record.start)) for p in inside)
    return all(registered[p] == n for p, n in inside.items()) and all(
        record.start <= first and last < max(record.end, record.start + 1) for first, last in spans
    )


def _key(record: CallRecord, log: list[Dispatched]) -> Hashable | None:
    """Equal for calls that one graph can stand for; None for a call that cannot be folded."""
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in record.leaves + record.out_leaves):
        return None
    if not record.returned:
        return None
    names: dict[int, Hashable] = {id(t): ("arg", i) for i, t in enumerate(record.tensors)}
    state = [*record.module.named_parameters(), *record.module.named_buffers()]
    held = []
    for name, tensor in state:
        names.setdefault(id(tensor), ("state", name))
        held.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    body = _body(names, log[record.start : record.end])
    if body is None:
        return None
    leaves = tuple(_leaf(names, leaf) for leaf in record.leaves)
    results = tuple(_leaf(names, leaf) for leaf in record.out_leaves)
    if any(text is None for text in results):
        return None
    kind = type(record.module)
    return kind, tuple(held), str(record.in_spec), leaves, body, str(record.out_spec), results


def _body(names: dict[int, Hashable], log: list[Dispatched]) -> Hashable | None:
    """The operators of a call with their tensors named; None when it reads or writes what is not its own."""
    body = []
    for position, entry in enumerate(log):
        read = []
        for tensor in entry.inputs:
            name = names.get(id(tensor)) or _constant(tensor)
            if name is None:
                return None
            read.append(name)
        if entry.mutates and any(name[0] != "op" for name in read[:1]):  # type: ignore[index]
            return None
        for index, tensor in enumerate(entry.outputs):
            names.setdefault(id(tensor), ("op", position, index))
        body.append((entry.text, tuple(read)))
    return tuple(body)


def _constant(tensor: torch.Tensor) -> Hashable | None:
    """The value of a tensor that Python code made from numbers, by value."""
    value = constant_of(tensor)
    return None if value is None else ("constant", repr(value))


def _leaf(names: dict[int, Hashable], leaf: object) -> Hashable | None:
    if isinstance(leaf, torch.Tensor):
        name = names.get(id(leaf))
        return None if name is None else (name, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    return type(leaf).__name__, repr(leaf)
