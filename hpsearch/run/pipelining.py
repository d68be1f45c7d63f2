"""The one file that knows torch.distributed.pipelining's private runtime (torch 2.13): a schedule's text in, calls out.

`_PipelineScheduleRuntime` takes the text, puts sends and receives between its actions, and walks this rank's line. What
an action computes is registered (`register_custom_function`); what is sent and received, `Door` tells, standing where
the runtime expects its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from hpsearch.lower.program import Passed
from hpsearch.schedule import Schedule

Kinds = schedules._ComputationType


class Work(Protocol):
    """What a stage does for one micro-batch. Tensors in and out are those that stages pass each other."""

    def forward(self, number: int, taken: list[Tensor]) -> list[Tensor]: ...
    def backward(self, number: int, taken: list[Tensor]) -> list[Tensor]: ...
    def backward_input(self, number: int, taken: list[Tensor]) -> list[Tensor]: ...
    def backward_weight(self, number: int) -> None: ...
    def reduce(self) -> None: ...


class Door:
    """A stage as the runtime sees it: what arrives, what leaves. `submod` is no FSDP module, so that the runtime leaves
    parameters alone."""

    submod = None
    args_recv_info: Mapping[int, tuple[Any, ...]] = {0: ()}
    act_send_info: Mapping[int, list[int]] = {}

    def __init__(
        self,
        index: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        takes: Sequence[Passed],
        takes_back: Sequence[Passed],
        work: Work,
    ) -> None:
        self.stage_index, self.num_stages = index, len(schedule.placement)
        self.group, self.group_size, self.group_rank = (
            group,
            len(schedule.ranks),
            dist.get_group_rank(group, dist.get_rank()),
        )
        self.is_first, self.is_last = index == 0, index == self.num_stages - 1
        self.device, self.has_backward, self.work = device, False, work
        self.placement = schedule.placement
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._takes, self._takes_back = takes, takes_back
        self.ahead: dict[int, list[Tensor]] = {}
        """Micro-batch → what came from the stage before."""
        self.back: dict[int, list[Tensor]] = {}
        """Micro-batch → what came from the stage behind."""
        self.out: dict[tuple[str, int], list[Tensor]] = {}
        """(F or B, micro-batch) → what is to be sent."""
        self.sent: dict[tuple[str, int], list[dist.Work]] = {}

    # What the runtime asks before the first step: nothing has to be found out or warmed up.

    def clear_runtime_states(self) -> None:
        for kept in (self.ahead, self.back, self.out, self.sent):
            kept.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: object, **kwargs: object) -> None:
        return None

    # What it asks where the text says SEND or RECV.

    def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        self.ahead[number] = [torch.empty(p.shape, dtype=p.dtype, device=self.device) for p in self._takes]
        return self._receives(self.ahead[number], self.stage_index - 1)

    def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        self.back[number] = [torch.empty(p.shape, dtype=p.dtype, device=self.device) for p in self._takes_back]
        return self._receives(self.back[number], self.stage_index + 1)

    def _receives(self, tensors: list[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.placement[stage]
        return [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for tensor in tensors]

    def get_fwd_send_ops(self, number: int) -> list[dist.P2POp]:
        return self._send("F", number, self.stage_index + 1)

    def get_bwd_send_ops(self, number: int) -> list[dist.P2POp]:
        return self._send("B", number, self.stage_index - 1)

    def _send(self, way: str, number: int, stage: int) -> list[dist.P2POp]:
        """Sends here and now: the runtime would hold what it sends, and so the tensor, until the end of the step."""
        for key in [key for key, works in self.sent.items() if key[0] == "B" and all(w.is_completed() for w in works)]:
            self.wait(*key)
        peer = self.placement[stage]
        self.sent[way, number] = [
            dist.isend(tensor, group=self.group, group_dst=peer) for tensor in self.out.pop((way, number))
        ]
        return []

    def wait(self, way: str, number: int) -> None:
        """Until a send is done; nothing where there was none."""
        for work in self.sent.pop((way, number), ()):
            work.wait()


class Runner:
    """Walks a schedule's text on this rank."""

    def __init__(self, schedule: Schedule, doors: Mapping[int, Door], micro_batches: int) -> None:
        self.doors = dict(doors)
        self._train = self._runtime(micro_batches)
        self._train._prepare_schedule_with_comms(_actions(schedule))
        self._forward = self._runtime(micro_batches)
        alone = {
            rank: [action for action in actions if action.computation_type == Kinds.FORWARD]
            for rank, actions in _actions(schedule, pairs=False).items()
        }
        self._forward.pipeline_order_with_comms = schedules._add_send_recv(
            alone, stage_to_rank=lambda stage: schedule.placement[stage], num_stages=len(schedule.placement)
        )

    def _runtime(self, micro_batches: int) -> Any:
        runtime = schedules._PipelineScheduleRuntime(list(self.doors.values()), micro_batches, scale_grads=False)
        functions: dict[Any, Callable[[Any, Any], None]] = {
            Kinds.FORWARD: self._on_forward,
            Kinds.FULL_BACKWARD: lambda action, ctx: self._on_backward(action, ctx, half=False),
            Kinds.BACKWARD_INPUT: lambda action, ctx: self._on_backward(action, ctx, half=True),
            Kinds.BACKWARD_WEIGHT: lambda action, ctx: self.doors[action.stage_index].work.backward_weight(
                action.microbatch_index
            ),
            Kinds.REDUCE_GRAD: lambda action, ctx: self.doors[action.stage_index].work.reduce(),
            Kinds.OVERLAP_F_B: self._on_pair,
        }
        for kind, function in functions.items():
            runtime.register_custom_function(kind, function)
        return runtime

    def step(self) -> None:
        """All actions of the text, in order; sends are done when it returns."""
        self._walk(self._train)

    def forward(self) -> None:
        """Its forwards alone, in the same order."""
        self._walk(self._forward)

    def _walk(self, runtime: Any) -> None:
        runtime.fwd_recv_ops.clear()
        runtime.bwd_recv_ops.clear()
        runtime.step(return_outputs=False)
        for door in self.doors.values():
            for key in list(door.sent):
                door.wait(*key)

    def _on_forward(self, action: Any, ctx: Any) -> None:
        stage, number = action.stage_index, action.microbatch_index
        door = self.doors[stage]
        if not door.is_first and stage - 1 not in self.doors:
            schedules._wait_batch_p2p(ctx.schedule_ref.fwd_recv_ops.pop((stage, number)))
        given = door.work.forward(number, door.ahead.pop(number, []))
        if stage + 1 in self.doors:
            self.doors[stage + 1].ahead[number] = given
        elif not door.is_last:
            door.out["F", number] = given

    def _on_backward(self, action: Any, ctx: Any, half: bool) -> None:
        stage, number = action.stage_index, action.microbatch_index
        door = self.doors[stage]
        if not door.is_last and stage + 1 not in self.doors:
            schedules._wait_batch_p2p(ctx.schedule_ref.bwd_recv_ops.pop((stage, number)))
            door.wait("F", number)  # the gradient is here, so what it is of has arrived there
        run = door.work.backward_input if half else door.work.backward
        given = run(number, door.back.pop(number, []))
        if stage - 1 in self.doors:
            self.doors[stage - 1].back[number] = given
        elif not door.is_first:
            door.out["B", number] = given

    def _on_pair(self, action: Any, ctx: Any) -> None:
        for one in action.sub_actions:
            if one.computation_type == Kinds.FORWARD:
                self._on_forward(one, ctx)
            else:
                self._on_backward(one, ctx, half=False)


def _actions(schedule: Schedule, pairs: bool = True) -> dict[int, list[Any]]:
    """The text in torch's own actions, by rank; without `pairs` the two of an overlapped pair one after the other."""
    read = schedules._Action.from_str
    return {
        rank: [read(str(one)) for step in steps for one in ((step,) if pairs else step.parts)]
        for rank, steps in enumerate(schedule.ranks)
    }
