"""`BoundStage`: one stage of a pipeline on one rank: forward, backward or its two halves, for any micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpsearch.errors import InternalError
from hpsearch.lower.dropout import Clock
from hpsearch.lower.executor import Bound, MicroBatch, Tensors

if TYPE_CHECKING:
    from hpsearch.lower.actions import Action, UnitParams
    from hpsearch.lower.program import ParallelProgram, StageEnds


class BoundStage(Bound):
    """Micro-batches in flight stand beside each other; what one needs for its backward is kept under its number.

    A step is `start`, any order of actions that a schedule allows, and `finish`.
    """

    def __init__(
        self,
        program: ParallelProgram,
        groups: Mapping[str, Any],
        coordinate: Mapping[str, int],
        device: torch.device,
        clock: Clock | None = None,
        inductor: bool = False,
    ) -> None:
        super().__init__(program, groups, coordinate, device, clock, inductor)
        if program.ends is None:
            raise InternalError(program.name, "expected a stage of a pipeline, but found a whole model")
        self.ends: StageEnds = program.ends
        self.alive: dict[int, MicroBatch] = {}
        """Micro-batches between their forward and the end of their backward."""
        self.losses: dict[int, Tensor] = {}
        """This rank's part of each micro-batch's loss."""
        self._done = 0
        self._params: Tensors = {}
        self._buffers: Tensors = {}
        self._training = True

    def start(self, params: Tensors, buffers: Tensors, *, training: bool = True) -> None:
        """Begins a step, or a pass without gradients."""
        self._params, self._buffers, self._training, self._done = params, buffers, training, 0
        self.losses.clear()

    def abandon(self) -> None:
        super().abandon()
        self.alive.clear()

    def forward_one(self, number: int, leaves: Mapping[str, Tensor], taken: Sequence[Tensor]) -> list[Tensor]:
        """One micro-batch through the stage: tensors of the batch and of the stage before in, for the next out."""
        with self._unless_it_fails():
            inputs = [leaves[slot.name] for slot in self.program.inputs[: len(self.ends.leaves)]]
            env, step = self._arrive([*inputs, *taken]), self.clock.step
            state = MicroBatch(self._params, self._buffers, env, training=self._training, number=number, step=step)
            for action in self.program.forward_actions:
                self._act(action, state)
            if self.program.loss_name:
                self.losses[number] = state.env[self.program.loss_name]
            given = [state.env[name].contiguous() for name in self.ends.gives]
            if self._training:
                self.alive[number] = state
                self._keep_what_backward_reads(state)
            return given

    def _keep_what_backward_reads(self, state: MicroBatch) -> None:
        read = {n for unit in self.program.units if unit.phase == "backward" for n in unit.reads}
        read.update(self.ends.gives_back)
        for name in [name for name in state.env if name not in read]:
            del state.env[name]

    def backward_one(self, number: int, taken: Sequence[Tensor], share: float) -> list[Tensor]:
        """The whole backward of one micro-batch: gradients from the stage behind in, those for the one before out."""
        self._done += 1
        state, last = self.alive.pop(number), self._done == self.program.micro_batches
        return self._backward(state, taken, share, self.program.backward_actions, self.program.unit_params, last)

    def backward_input_one(self, number: int, taken: Sequence[Tensor], share: float) -> list[Tensor]:
        """The half of it that others wait for."""
        ends = self.ends
        return self._backward(self.alive[number], taken, share, ends.input_actions, ends.input_params, False)

    def backward_weight_one(self, number: int) -> None:
        """The other half."""
        self._done += 1
        with self._unless_it_fails():
            state = self.alive.pop(number)
            state.last = self._done == self.program.micro_batches
            self._run_actions(self.ends.weight_actions, self.ends.weight_params, state)

    def _backward(
        self,
        state: MicroBatch,
        taken: Sequence[Tensor],
        share: float,
        actions: tuple[Action, ...],
        params: tuple[UnitParams, ...],
        last: bool,
    ) -> list[Tensor]:
        with self._unless_it_fails():
            state.last = last
            state.env.update((passed.name, t) for passed, t in zip(self.ends.takes_back, taken, strict=True))
            if self.program.tangent_name:
                tangent = torch.as_tensor(share, dtype=self.program.tangent_dtype, device=self.device)
                state.env[self.program.tangent_name] = tangent
            self._run_actions(actions, params, state)
            given = [state.env[name].contiguous() for name in self.ends.gives_back]
            state.env.clear()
            return given

    def _run_actions(self, actions: tuple[Action, ...], params: tuple[UnitParams, ...], state: MicroBatch) -> None:
        self._does = params
        try:
            for action in actions:
                self._act(action, state)
        finally:
            self._does = self.program.unit_params

    def loss(self, share: float) -> Tensor:
        """`share` times the sum of the micro-batches' losses, the same on all ranks of the stage."""
        with self._unless_it_fails():
            total = torch.stack([self.losses[number] for number in sorted(self.losses)]).sum(0) * share
            self.losses.clear()
            return self._reduce_loss(total)

    def let_go(self) -> None:
        """Ends a pass without gradients."""
        self.abandon()
