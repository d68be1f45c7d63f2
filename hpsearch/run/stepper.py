"""One program on this process's place of the mesh: local batches in, loss and gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hpsearch.errors import BatchError, InternalError
from hpsearch.graph import ModelGraph
from hpsearch.layout import DATA_AXES, Layout
from hpsearch.lower import Clock, ParallelProgram, PipelineProgram
from hpsearch.lower.regional import compile_seconds
from hpsearch.plan import Plan
from hpsearch.run.batch import Batch, Leaf, leaves
from hpsearch.run.ranks import Ranks

NUM_ITEMS = "num_items_in_batch"
"""Hugging Face's name for the number of valid targets that a summed loss is divided by."""

Tensors = dict[str, torch.Tensor]
Inputs = list[torch.Tensor]
"""One micro-batch in the order of the program's inputs."""


@dataclass(frozen=True)
class Built:
    """What compiling made for one shape of batch."""

    graph: ModelGraph
    plan: Plan
    program: ParallelProgram | PipelineProgram
    batch: Batch
    """The global batch of one step it was made for; only shapes and dtypes matter."""

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """The tensors of a global batch as a caller passes them."""
        dims = {i.name: _batch_dim(i.per_row) for i in self.graph.inputs}
        return {name: Leaf(name, tuple(t.shape), dims.get(name), t.dtype) for name, t in leaves(self.batch).items()}

    @property
    def micro_batches(self) -> int:
        return self.plan.file.job.micro_batches


def _batch_dim(per_row: tuple[int, ...]) -> int | None:
    dims = [dim for dim, rows in enumerate(per_row) if rows]
    return dims[0] if dims else None


class StepInputs:
    """The batches of one program, cut into micro-batches."""

    def __init__(self, built: Built, ranks: Ranks) -> None:
        self.built, self.ranks = built, ranks

    def micro_batches(self, local: Mapping[str, torch.Tensor], num_items: int | None) -> list[Inputs]:
        """The local batch (rows of this data rank) as inputs of the program, one list for each micro-batch."""
        count = self.built.micro_batches
        return [self._inputs(local, index, count, num_items) for index in range(count)]

    def _inputs(self, local: Mapping[str, torch.Tensor], index: int, count: int, num_items: int | None) -> Inputs:
        found: Tensors = {}
        for slot in self.built.program.inputs:
            if slot.name == NUM_ITEMS and NUM_ITEMS not in local:
                found[slot.name] = torch.full(slot.shape, num_items, dtype=slot.dtype, device=self.ranks.device)
                continue
            rows = self.built.leaves[slot.name].rows(local[slot.name], index, count)
            layout = Layout(tuple((axis, p) for axis, p in slot.layout if axis not in DATA_AXES))
            cut = self.ranks.piece(tuple(rows.shape), layout)
            found[slot.name] = rows[cut].to(self.ranks.device, slot.dtype).contiguous()
            if tuple(found[slot.name].shape) != slot.local_shape:
                found_shape = list(found[slot.name].shape)
                raise InternalError(f"input {slot.name}", f"expected {list(slot.local_shape)}, but cut {found_shape}")
        return list(found.values())


class Stepper(StepInputs):
    """Runs one program. Tensors in and out are local pieces; `params` and gradients are by FQN."""

    def __init__(self, built: Built, ranks: Ranks, written: Callable[[], int], clock: Clock, inductor: bool) -> None:
        """`written`: a number that grows whenever a parameter is written to; `clock`: which step it is."""
        super().__init__(built, ranks)
        assert isinstance(built.program, ParallelProgram)
        self._written = written
        self.bound = built.program.bind(ranks.groups, ranks.coordinate, ranks.device, clock, inductor)
        self.sums = built.graph.adds_up
        self._version = -1

    @property
    def compile_s(self) -> dict[str, float]:
        """Function → seconds of its compilation."""
        return compile_seconds(self.bound.regions)

    def evaluate(self, params: Tensors, buffers: Tensors, batches: list[Inputs]) -> torch.Tensor:
        """The loss of all micro-batches, without gradients."""
        self._forget_old()
        losses = [self.bound.forward(params, buffers, inputs, number) for number, inputs in enumerate(batches)]
        return self._combine(losses)

    def step(self, params: Tensors, buffers: Tensors, batches: list[Inputs]) -> tuple[torch.Tensor, Tensors]:
        """Loss and stored-layout gradients of all micro-batches."""
        self._forget_old()
        return self.bound.step(params, buffers, batches)

    def forward_train(
        self, params: Tensors, buffers: Tensors, batches: list[Inputs]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Tensors]]:
        """The loss, and a function from the loss's gradient to stored-layout gradients; to be called once."""
        if len(batches) > 1:
            loss, grads = self.step(params, buffers, batches)
            return loss, lambda grad: {fqn: g * grad.to(g.dtype) for fqn, g in grads.items()}
        self._forget_old()
        loss, state = self.bound.forward_train(params, buffers, batches[0])
        version = self._version

        def backward(grad: torch.Tensor) -> Tensors:
            if self._written() != version:
                raise RuntimeError("parameters were changed between forward and backward; call the model again")
            self.bound.backward(state, grad, last=True)
            return self.bound.finish()

        return loss, backward

    def _forget_old(self) -> None:
        """Parameters that are kept gathered for a whole step are stale once any of them was written to."""
        version = self._written()
        if version != self._version:
            self.bound.abandon()
            self._version = version

    def _combine(self, losses: list[Any]) -> torch.Tensor:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total if self.sums else total / len(losses)


def check_equal_targets(counts: tuple[int, ...]) -> None:
    """A model's own mean, averaged over micro-batches, is the mean over all targets only if all have equally many."""
    if len(set(counts)) > 1:
        raise BatchError(
            "loss",
            f"the model averages over valid targets itself, but the micro-batches have {list(counts)} of them",
            "Use a loss that takes num_items_in_batch, pad so that the counts agree, or pin fix={'micro_batches': 1}.",
        )
