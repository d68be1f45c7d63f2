"""A pipeline on this process's place: its stages, driven by the plan's schedule; local batches in, gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from hpsearch.graph import ADDS_UP
from hpsearch.lower import Clock, PipelineProgram
from hpsearch.lower.regional import compile_seconds
from hpsearch.lower.stage import BoundStage
from hpsearch.run.pipelining import Door, Runner
from hpsearch.run.ranks import Ranks
from hpsearch.run.stepper import Built, Inputs, StepInputs, Tensors


class PipelineStepper(StepInputs):
    """As `Stepper`, for a program of several stages. Gradients are of the parameters on this rank."""

    def __init__(self, built: Built, ranks: Ranks, written: Callable[[], int], clock: Clock, inductor: bool) -> None:
        super().__init__(built, ranks)
        self.program, self._written = built.program, written
        assert isinstance(self.program, PipelineProgram)
        self.stages = {
            index: BoundStage(self.program.stages[index], ranks.groups, ranks.coordinate, ranks.device, clock, inductor)
            for index in self.program.stages_of(ranks.pipeline_rank)
        }
        adds_up = self.program.loss_reduction in ADDS_UP
        self.share = 1.0 if adds_up else 1.0 / self.program.micro_batches
        self.grads: dict[int, Tensors] = {}
        self.batches: list[Inputs] = []
        doors = {index: self._door(index, stage) for index, stage in self.stages.items()}
        self.runner = Runner(self.program.schedule, doors, self.program.micro_batches)

    def _door(self, index: int, stage: BoundStage) -> Door:
        ends, ranks = stage.ends, self.ranks
        assert ranks.pipeline is not None
        work = _Work(self, index, stage)
        return Door(index, self.program.schedule, ranks.pipeline, ranks.device, ends.takes, ends.takes_back, work)

    @property
    def compile_s(self) -> dict[str, float]:
        """Function, behind its stage → seconds of its compilation."""
        found = {index: compile_seconds(stage.regions) for index, stage in self.stages.items()}
        return {f"{index}.{name}": seconds for index, own in found.items() for name, seconds in own.items()}

    def evaluate(self, params: Tensors, buffers: Tensors, batches: list[Inputs]) -> torch.Tensor:
        """The loss of all micro-batches, without gradients."""
        return self._pass(params, buffers, batches, training=False)

    def step(self, params: Tensors, buffers: Tensors, batches: list[Inputs]) -> tuple[torch.Tensor, Tensors]:
        """Loss and stored-layout gradients of all micro-batches."""
        loss = self._pass(params, buffers, batches, training=True)
        return loss, self._together(params)

    def forward_train(
        self, params: Tensors, buffers: Tensors, batches: list[Inputs]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Tensors]]:
        """The loss, and a function from the loss's gradient to stored-layout gradients; forward and backward of the
        schedule cannot be taken apart, so the gradients are made here and scaled there."""
        loss, grads = self.step(params, buffers, batches)
        return loss, lambda grad: {fqn: g * grad.to(g.dtype) for fqn, g in grads.items()}

    def _pass(self, params: Tensors, buffers: Tensors, batches: list[Inputs], *, training: bool) -> torch.Tensor:
        self.batches, self.grads = batches, {}
        for stage in self.stages.values():
            stage.start(params, buffers, training=training)
        try:
            (self.runner.step if training else self.runner.forward)()
            return self._loss()
        finally:
            self.batches = []
            for stage in self.stages.values():
                stage.let_go()

    def leaves(self, number: int) -> Mapping[str, torch.Tensor]:
        """Tensors of one micro-batch's rows by name."""
        return dict(zip((slot.name for slot in self.program.inputs), self.batches[number], strict=True))

    def _loss(self) -> torch.Tensor:
        """The loss of the step on every rank of the pipeline."""
        index = self.program.loss_stage
        if index in self.stages:
            loss = self.stages[index].loss(self.share)
        else:
            program = self.program.stages[index]
            loss = torch.empty((), dtype=program.tangent_dtype, device=self.ranks.device)
        dist.broadcast(loss, group=self.ranks.pipeline, group_src=self.program.schedule.placement[index])
        return loss

    def _together(self, params: Tensors) -> Tensors:
        """Gradients of this rank's stages; those of a parameter that several stages hold are added up."""
        found: Tensors = {}
        for index in sorted(self.grads):
            for fqn, grad in self.grads[index].items():
                found[fqn] = found[fqn] + grad if fqn in found else grad
        self.grads = {}
        for fqn, holders in self.program.holders.items():
            group = self.ranks.shared.get(holders)
            if group is not None and self.program.slot(fqn).trainable:
                if fqn not in found:
                    found[fqn] = torch.zeros_like(params[fqn])
                dist.all_reduce(found[fqn], group=group)
        return {slot.fqn: found[slot.fqn] for slot in self.program.params if slot.fqn in found}


class _Work:
    """What the schedule's actions do on one stage."""

    def __init__(self, stepper: PipelineStepper, index: int, stage: BoundStage) -> None:
        self.stepper, self.index, self.stage = stepper, index, stage

    def forward(self, number: int, taken: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.stage.forward_one(number, self.stepper.leaves(number), taken)

    def backward(self, number: int, taken: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.stage.backward_one(number, taken, self.stepper.share)

    def backward_input(self, number: int, taken: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.stage.backward_input_one(number, taken, self.stepper.share)

    def backward_weight(self, number: int) -> None:
        self.stage.backward_weight_one(number)

    def reduce(self) -> None:
        self.stepper.grads[self.index] = self.stage.finish()
