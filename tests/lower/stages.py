"""A whole pipeline in one process: the schedule's actions in the order of its dry run, tensors handed over by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpsearch.lower import PipelineProgram
from hpsearch.lower.stage import BoundStage
from hpsearch.schedule import Action, dry_run

Watch = Callable[[int], AbstractContextManager[Any]]
"""Pipeline rank → what is open while it works."""


def _nothing(rank: int) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass
class Played:
    """Stages whose mesh is one device."""

    program: PipelineProgram
    watch: Watch = _nothing
    stages: list[BoundStage] = field(default_factory=list)
    ahead: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    back: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    sent: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = [BoundStage(stage, {}, {}, torch.device("cpu")) for stage in self.program.stages]

    def step(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        micro_batches: list[dict[str, Tensor]],
        share: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients; a gradient of several stages is their sum."""
        for stage in self.stages:
            stage.start(params, buffers)
        for rank, step in dry_run(self.program.schedule).order:
            for action in step.parts:
                with self.watch(rank):
                    self.act(action, micro_batches, share)
        grads: dict[str, Tensor] = {}
        for index, stage in enumerate(self.stages):
            with self.watch(self.program.schedule.placement[index]):
                found = stage.finish()
            for fqn, grad in found.items():
                grads[fqn] = grads[fqn] + grad if fqn in grads else grad
        return self.stages[self.program.loss_stage].loss(share), grads

    def act(self, action: Action, micro_batches: list[dict[str, Tensor]], share: float) -> None:
        stage, number = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            given = stage.forward_one(number, micro_batches[number], self.arrived(self.ahead, action))
            self.ahead[action.stage + 1, number] = self.sent[action.stage, number] = given
        elif action.kind == "W":
            stage.backward_weight_one(number)
        else:
            self.sent.pop((action.stage, number), None)
            run = stage.backward_one if action.kind == "B" else stage.backward_input_one
            self.back[action.stage - 1, number] = run(number, self.arrived(self.back, action), share)

    @staticmethod
    def arrived(ways: dict[tuple[int, int], list[Tensor]], action: Action) -> list[Tensor]:
        """Copies, as a receive makes them."""
        return [tensor.clone() for tensor in ways.pop((action.stage, action.microbatch), [])]
