"""Small models on stages of a pipeline, all stages in one process, against the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpsearch.capture import capture
from hpsearch.lower import PipelineProgram, lower
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.cases.plans import slow_devices
from tests.lower.stages import Played


@dataclass(frozen=True)
class Staged:
    plan: Plan
    program: PipelineProgram
    loss: Tensor
    grads: dict[str, Tensor]
    wanted: dict[str, Tensor]
    """Gradients of the plain model on the whole batch."""

    @property
    def worst(self) -> float:
        """Largest error of a gradient, relative to its largest element."""
        assert set(self.grads) == set(self.wanted)
        return max(
            float((self.grads[n] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            for n, wanted in self.wanted.items()
        )


def staged(model: nn.Module, batch: tuple[Tensor, ...], fix: Mapping[str, object]) -> Staged:
    """A step of `model` (fp64; its loss is a mean over rows) under the plan that `fix` leaves."""
    captured = capture(model, batch, recipe="fp64")
    devices = int(str(fix["pp"]))
    plan = search(captured.graph, slow_devices(devices), global_batch=len(batch[0]), fix=fix)
    program = lower(capture(model, batch, recipe="fp64", rows=plan.micro_batch_rows), plan)
    assert isinstance(program, PipelineProgram)
    pieces = [{} for _ in range(program.micro_batches)]  # type: list[dict[str, Tensor]]
    for slot, tensor in zip(program.inputs, batch, strict=True):
        for one, piece in zip(pieces, tensor.chunk(program.micro_batches), strict=True):
            one[slot.name] = piece
    params = {n: p.detach() for n, p in model.named_parameters()}
    loss, grads = Played(program).step(params, dict(model.named_buffers()), pieces, 1 / program.micro_batches)
    model.zero_grad()
    expected = model(*batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    return Staged(plan, program, loss, grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
