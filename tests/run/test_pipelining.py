"""What we use of torch's private pipeline runtime is there, does what we rely on, and asks of stages what we answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from hpsearch.run.pipelining import Door, Runner
from hpsearch.schedule import Schedule, make_schedule


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_private_names_and_their_parameters() -> None:
    """The day torch changes one of them, this says which; `hpsearch/run/pipelining.py` is the one file to mend."""
    runtime = schedules._PipelineScheduleRuntime
    assert list(inspect.signature(runtime.register_custom_function).parameters) == [
        "self",
        "computation_type",
        "custom_function",
    ]
    assert list(inspect.signature(runtime._prepare_schedule_with_comms).parameters) == ["self", "actions", "format"]
    assert list(inspect.signature(schedules._add_send_recv).parameters) == [
        "compute_actions",
        "stage_to_rank",
        "num_stages",
    ]
    assert list(inspect.signature(schedules._wait_batch_p2p).parameters) == ["work"]
    assert set(schedules._Action._fields) == {"stage_index", "computation_type", "microbatch_index", "sub_actions"}
    assert next(iter(schedules._PipelineContext.__dataclass_fields__)) == "schedule_ref"
    kinds = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE_GRAD", "OVERLAP_F_B"}
    assert kinds <= set(schedules._ComputationType.__members__)


ASKED = {
    "act_send_info", "args_recv_info", "backward_one_chunk", "backward_weight_one_chunk", "clear_runtime_states",
    "forward_one_chunk", "get_bwd_recv_ops", "get_bwd_send_ops", "get_fwd_recv_ops", "get_fwd_send_ops",
    "get_local_bwd_output", "has_backward", "is_first", "is_last", "output_chunks", "perform_reduce_grad",
    "scale_grads", "stage_index", "stage_index_to_group_rank", "submod",
}  # fmt: skip
REPLACED = {
    "backward_one_chunk", "backward_weight_one_chunk", "forward_one_chunk", "get_local_bwd_output", "output_chunks",
    "perform_reduce_grad", "scale_grads",
}  # fmt: skip
"""Those that only the runtime's own computing asks for, in whose place ours is registered."""


def test_what_the_runtime_asks_of_a_stage_is_what_a_door_answers(alone: dist.ProcessGroup) -> None:
    parts = (
        schedules._PipelineScheduleRuntime._step_microbatches,
        schedules.PipelineScheduleMulti.step,
        schedules.PipelineScheduleMulti._step_microbatches,
        schedules.PipelineScheduleMulti.__init__,
        schedules.PipelineScheduleMulti._validate_adjacent_stage_communication,
        schedules.PipelineScheduleMulti._validate_and_set_stage_mapping,
    )
    found = {name for part in parts for name in re.findall(r"\bstage\.(\w+)", inspect.getsource(part))}
    assert found == ASKED
    door = Door(0, make_schedule("interleaved", 1, 2, 1), alone, torch.device("cpu"), (), (), Recorder([], 0))
    assert [name for name in sorted(ASKED - REPLACED) if not hasattr(door, name)] == []
    assert {"num_stages", "group_size", "group_rank", "device"} <= set(vars(door))


class Recorder:
    """A stage that says what it is told to do."""

    def __init__(self, log: list[str], stage: int) -> None:
        self.log, self.stage = log, stage

    def forward(self, number: int, taken: list[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.stage}F{number}")
        return [torch.tensor(float(number))] if not self.stage else taken

    def backward(self, number: int, taken: list[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.stage}B{number}")
        return [torch.tensor(float(number))]

    def backward_input(self, number: int, taken: list[Tensor]) -> list[Tensor]:
        self.log.append(f"{self.stage}I{number}")
        assert [int(t) for t in taken] == [number] * (1 - self.stage)
        return [torch.tensor(float(number))]

    def backward_weight(self, number: int) -> None:
        self.log.append(f"{self.stage}W{number}")

    def reduce(self) -> None:
        self.log.append(f"{self.stage} reduced")


def runs(schedule: Schedule, group: dist.ProcessGroup, forward: bool = False) -> list[str]:
    log: list[str] = []
    stages = range(len(schedule.placement))
    doors = {s: Door(s, schedule, group, torch.device("cpu"), (), (), Recorder(log, s)) for s in stages}
    runner = Runner(schedule, doors, schedule.micro_batches)
    for _ in range(2):
        log.clear()
        (runner.forward if forward else runner.step)()
    return log


@pytest.mark.parametrize("kind", ["interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_what_runs_is_the_text(kind: str, alone: dist.ProcessGroup) -> None:
    """One rank, two stages on it, so that all is in one process; a stage's gradients are reduced behind its last."""
    schedule = make_schedule(kind, 1, 2, 4)
    log = runs(schedule, alone)
    assert [word for word in log if "reduced" not in word] == [str(a) for _, a in schedule.actions()]
    for stage in (0, 1):
        mine = [word for word in log if word[0] == str(stage)]
        assert mine[-1] == f"{stage} reduced"
    forwards = [str(a) for _, a in schedule.actions() if a.kind == "F"]
    assert runs(schedule, alone, forward=True) == forwards


def test_a_text_by_hand_runs_as_it_stands(alone: dist.ProcessGroup) -> None:
    text = "0F1 1F1 1I1 0F0 1F0 1B0 0B0 1W1 0I1 0W1"
    log = runs(Schedule.parse(text), alone)
    assert " ".join(word for word in log if "reduced" not in word) == text
