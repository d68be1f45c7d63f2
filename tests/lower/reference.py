"""The plain model against the program: one step, loss and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.capture import CapturedGraph
from hpsearch.graph import ADDS_UP
from hpsearch.layout import Layout, Mesh
from hpsearch.lower import ParallelProgram
from hpsearch.lower.accounting import collectives_of
from tests.lower.simulate import run_ranks

Batch = Any
Loss = Callable[[Any, Any], Tensor]


def cut(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What `rank` holds of a global tensor: torch.chunk in split order, spelled independently of the program."""
    coordinate = mesh.coordinate(rank)
    for axis, placement in layout:
        size = mesh.size(axis)
        pieces = list(tensor.chunk(size, placement.dim)) if tensor.shape[placement.dim] else []
        empty = tensor.narrow(placement.dim, 0, 0)
        tensor = (pieces + [empty] * size)[coordinate[axis]]
    return tensor.contiguous()


def plain_step(
    model: nn.Module, batches: list[Batch], sums: bool, loss_of: Loss | None = None
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss of all micro-batches together (their sum or mean) and gradients by name."""
    share = 1.0 if sums else 1.0 / len(batches)
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        out = model(**batch) if isinstance(batch, dict) else model(batch[0])
        loss = (loss_of(out, batch) if loss_of else out if isinstance(out, Tensor) else out.loss) * share
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


NOISE = 1e-9
"""A gradient this much smaller than the largest is but rounding (keys' biases); it is compared to the largest."""


@dataclass(frozen=True)
class Errors:
    """max |a − b| / max |b|, the largest over all ranks."""

    loss: float
    gradient: float


def compare(
    model: nn.Module,
    batches: list[Batch],
    captured: CapturedGraph,
    program: ParallelProgram,
    loss_of: Loss | None = None,
    *,
    told: bool = True,
) -> Errors:
    """One step of the program on every rank against the plain model; bytes sent are held to the program's own list if
    they are all `told`, which they are not where the data says how many rows go where."""
    loss, wanted = plain_step(model, batches, program.loss_reduction in ADDS_UP, loss_of)
    state = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    mesh, slots = program.mesh, {slot.fqn: slot for slot in program.params}

    def work(rank: int, bound: Any) -> tuple[Tensor, Tensor, dict[str, Tensor], list[Any]]:
        params = {n: cut(state[n].detach(), s.stored, mesh, rank) for n, s in slots.items()}
        micro = [
            [cut(t, s.layout, mesh, rank) for t, s in zip(captured.batch.flatten(b), program.inputs, strict=True)]
            for b in batches
        ]
        alone = sum(bound.forward(params, buffers, inputs) for inputs in micro)
        sent = bound.functions["c10d"].log
        sent.clear()
        total, grads = bound.step(params, buffers, micro)
        return alone, total, grads, sent

    losses, gradients = [], []
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for rank, (alone, total, grads, sent) in enumerate(run_ranks(program, work)):
        share = 1.0 if program.loss_reduction in ADDS_UP else 1.0 / len(batches)
        losses += [relative(alone * share, loss), relative(total, loss)]
        assert set(grads) == {n for n, s in slots.items() if s.trainable}
        for name, grad in grads.items():
            whole = wanted[name]
            whole = torch.zeros_like(state[name]) if whole is None else whole
            piece = cut(whole, slots[name].stored, mesh, rank)
            assert grad.shape == piece.shape, name
            assert grad.dtype == slots[name].master_dtype
            scale = float(whole.abs().max())
            scale = largest if scale < NOISE * largest else scale
            gradients.append(float((grad - piece).abs().max()) / scale if grad.numel() else 0.0)
        if rank == 0 and told:
            assert sum_by_kind(sent) == stated_by_kind(program)
    return Errors(max(losses), max(gradients))


def sum_by_kind(sent: list[tuple[str, tuple[int, ...], int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, _, nbytes in sent:
        found[kind] += nbytes
    return found


def stated_by_kind(program: ParallelProgram) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in collectives_of(program):
        found[entry.kind] += entry.nbytes * entry.calls
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
