"""Optimizer states that rest in host memory: on the device for the update, and only then.

Any torch optimizer over the parameters of one parallel model is served, by hooks around its step: states come to the
device before it and leave behind it, the first time right after it has made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpsearch.lower.host import Host, Trip


class StatesOnHost:
    """Of one parallel model's parameters. Lives as long as the model does."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self._ours = {id(parameter) for parameter in parameters.values()}
        self._host = Host(device)
        self._away: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[list[Tensor], Trip]]]
        self._away = weakref.WeakKeyDictionary()
        me = weakref.ref(self)
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: _call(me, "bring", optimizer))
        behind = register_optimizer_step_post_hook(lambda optimizer, *_: _call(me, "send", optimizer))
        weakref.finalize(self, _remove, before, behind)

    def bring(self, optimizer: torch.optim.Optimizer) -> None:
        """Everything that is away, to the device."""
        for tensors, trip in self._away.pop(optimizer, ()):
            self._host.call_back(trip)
            for tensor, local in zip(tensors, self._host.arrive(trip), strict=True):
                _put(tensor, local)

    def send(self, optimizer: torch.optim.Optimizer) -> None:
        """The states of our parameters, to host memory; what stands in their place has the values, on the host."""
        found = list(self._states(optimizer))
        if not found:
            return
        trip = self._host.send([_local(t) for t in found], range(len(found)))
        self._host.let_go(trip)
        for tensor, local in zip(found, self._host.views(trip), strict=True):
            _put(tensor, local)
        self._away.setdefault(optimizer, []).append((found, trip))

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        for parameter, state in optimizer.state.items():
            if id(parameter) in self._ours:
                yield from (t for t in state.values() if isinstance(t, Tensor) and t.ndim and _local(t).numel())


def _call(me: weakref.ref[StatesOnHost], what: str, optimizer: torch.optim.Optimizer) -> None:
    if (states := me()) is not None:
        with torch.no_grad():
            getattr(states, what)(optimizer)


def _remove(*handles: Any) -> None:
    for handle in handles:
        handle.remove()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _put(tensor: Tensor, local: Tensor) -> None:
    """`local` as the memory of `tensor`."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = local
    else:
        tensor.data = local
