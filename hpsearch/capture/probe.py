"""One eager pass under fake tensors that writes down what every candidate block is given, does, and returns.

A candidate is a child of a container (ModuleList, ModuleDict, Sequential) that has children and parameters of its own.
Two calls belong to one class when module type, arguments, parameters and the whole sequence of dispatched operators
are equal, with every tensor named by where it came from (argument, parameter, earlier op of the same call). That is the
proof that one captured graph stands for both: whatever the modules' attributes say, they did the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Leaves of arguments and results that may be baked into a graph."""


@dataclass
class Dispatched:
    """One operator call: everything about it except which tensors, and the tensors."""

    text: Hashable
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    mutates: bool


@dataclass(eq=False)
class CallRecord:
    """One call of one candidate module."""

    module: nn.Module
    prefix: str
    """FQN of the module."""
    leaves: list[Any] = field(default_factory=list)
    """Flattened (args, kwargs)."""
    in_spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)
    out_spec: Any = None
    start: int = 0
    end: int = 0
    """The call's slice of the log."""
    nested: list[CallRecord] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Distinct tensor arguments, in order."""
        return distinct(self.leaves)

    @property
    def returned(self) -> tuple[torch.Tensor, ...]:
        """Distinct tensor results that are not arguments, in order."""
        given = {id(t) for t in self.tensors}
        return tuple(t for t in distinct(self.out_leaves) if id(t) not in given)


def distinct(leaves: list[Any]) -> tuple[torch.Tensor, ...]:
    return tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


@dataclass
class Probe:
    """The log of a pass and its candidate calls, nested as they were called."""

    log: list[Dispatched]
    calls: list[CallRecord]


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that may be blocks, by FQN, at every depth."""
    found: dict[str, nn.Module] = {}
    for prefix, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for name, child in container.named_children():
                if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                    found[f"{prefix}.{name}" if prefix else name] = child
    return found


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Dispatched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        outputs = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        text = (str(func), torch.is_grad_enabled(), str(spec), tuple(_text(leaf) for leaf in leaves),
                tuple(_text(leaf) for leaf in outputs))  # fmt: skip
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.entries.append(Dispatched(text, inputs, outputs, func._schema.is_mutable))
        return result


def _text(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf).__name__, str(leaf)


@contextmanager
def probing(model: nn.Module) -> Iterator[Probe]:
    """While open, calls of candidates of `model` and all dispatched operators are recorded."""
    log, open_calls, roots = _Log(), [], []  # type: ignore[var-annotated]

    def before(record_of: tuple[nn.Module, str], args: Any, kwargs: Any) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        record = CallRecord(*record_of, leaves=leaves, in_spec=spec, start=len(log.entries))
        (open_calls[-1].nested if open_calls else roots).append(record)
        open_calls.append(record)

    def after(result: Any) -> None:
        record = open_calls.pop()
        record.out_leaves, record.out_spec = pytree.tree_flatten(result)
        record.end = len(log.entries)

    handles = []
    for prefix, module in candidates(model).items():
        key = (module, prefix)
        handles += [
            module.register_forward_pre_hook(lambda _m, a, k, key=key: before(key, a, k), with_kwargs=True),
            module.register_forward_hook(lambda _m, _a, _k, out: after(out), with_kwargs=True),
        ]
    try:
        with log:
            yield Probe(log.entries, roots)
    finally:
        for handle in handles:
            handle.remove()
