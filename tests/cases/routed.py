"""What ranks do in the cases about experts: a step whose collectives are written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hpsearch
from hpsearch.plan import Plan
from tests.end_to_end import parity
from tests.end_to_end.experts import EXPERTS
from tests.end_to_end.models import build

Launch = tuple[tuple[int, ...], str]
"""Ranks of a group, and what it does."""
assert EXPERTS, "registers the families"


@dataclass
class Launches(TorchDispatchMode):
    """The collectives that are started while it is open, in order; no sends from one rank to another."""

    found: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = str(func).partition(".")
        if space in ("_c10d_functional", "c10d") and not name.startswith(("wait_tensor", "send", "recv")):
            self.found.append((tuple(dist.get_process_group_ranks(_group(args, kwargs or {}))), name))
        return func(*args, **(kwargs or {}))


def _group(args: Any, kwargs: dict[str, Any]) -> dist.ProcessGroup:
    for value in (*reversed(args), *kwargs.values()):
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return _resolve_process_group(value)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    raise AssertionError(f"no group among {args}")


def step(family: str, plan: bytes) -> tuple[list[Launch], dict[str, float | None]]:
    """(Collectives of a step, largest element of each gradient or None)."""
    with parity.double_throughout(family, "fp64"):
        case = build(family, torch.float64)
        model = hpsearch.compile(case.model, plan=Plan.from_bytes(plan), loss=case.loss, recipe="fp64")
        batch = model.local_rows(case.batch)
        model.step(batch)  # what is made once is made
        for parameter in model.parameters():
            parameter.grad = None
        with Launches() as launches:
            model.step(batch)
        largest = {name: _largest(parameter.grad) for name, parameter in model.named_parameters()}
    return launches.found, largest


def _largest(grad: torch.Tensor | None) -> float | None:
    if grad is None:
        return None
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole.abs().max().item()


def drained(queues: list[list[Launch]]) -> bool:
    """Whether all ranks get to the end of their queues, where a collective runs once all of its group are at it."""
    left = [list(reversed(queue)) for queue in queues]
    moved = True
    while moved:
        moved = False
        for queue in left:
            if queue and all(left[rank] and left[rank][-1] == queue[-1] for rank in queue[-1][0]):
                for rank in queue[-1][0]:
                    if left[rank] is not queue:
                        left[rank].pop()
                queue.pop()
                moved = True
    return not any(left)
