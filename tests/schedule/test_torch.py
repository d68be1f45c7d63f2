"""The same text as torch.distributed.pipelining, which runs it; and torch takes ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.nn import Identity, Module

from hpsearch.schedule import Schedule, make_schedule, placement

CLASSES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zb-h1": theirs.ScheduleInterleavedZeroBubble,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}


@dataclass
class Stage:
    """What torch's schedules ask a stage before anything runs."""

    group_size: int
    num_stages: int
    group_rank: int = 0
    submod: Module = field(default_factory=Identity)
    has_backward: bool = True
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def torch_text(kind: str, ranks: int, virtual: int, micro_batches: int) -> str:
    """Torch's actions of each rank, without the holes, and without the gradient reductions it adds by itself."""
    stages = [Stage(ranks, ranks * virtual) for _ in range(virtual)]
    single = kind in ("gpipe", "1f1b")
    order = CLASSES[kind](stages[0] if single else stages, micro_batches).pipeline_order
    kept = [[str(a) for a in order[rank] if a is not None and "REDUCE" not in str(a)] for rank in range(ranks)]
    return "\n".join(" ".join(actions) for actions in kept)


SIZES = [
    (kind, ranks, virtual, m)
    for kind, virtuals in (
        ("gpipe", (1,)), ("1f1b", (1,)), ("interleaved", (2, 3, 4)), ("zb-h1", (1,)), ("interleaved-zb", (2, 3)),
        ("zbv", (2,)), ("dualpipev", (2,)),
    )
    for ranks in (1, 2, 3, 4, 8)
    for virtual in virtuals
    for m in {
        "gpipe": (1, 5), "1f1b": (ranks, 2 * ranks + 1), "interleaved": (ranks, 4 * ranks),
        "zb-h1": (ranks, 3 * ranks), "interleaved-zb": (ranks, 3 * ranks), "zbv": (1, ranks, 2 * ranks, 4 * ranks + 1),
        "dualpipev": (2 * ranks, 4 * ranks + 1),
    }[kind]
]  # fmt: skip


@pytest.mark.parametrize(("kind", "ranks", "virtual", "m"), SIZES)
def test_the_same_actions_as_torch(kind: str, ranks: int, virtual: int, m: int) -> None:
    found, wanted = str(make_schedule(kind, ranks, virtual, m)), torch_text(kind, ranks, virtual, m)
    if kind == "1f1b":
        wanted = with_forwards_from_zero(wanted)
    assert found == wanted


def with_forwards_from_zero(text: str) -> str:
    """Torch's text of 1F1B counts the forwards of the last rank from 1, so that one of them is of no micro-batch. What
    torch runs is another code, which counts from 0: the text alone is wrong."""
    *first, last = text.splitlines()
    words = [word if "B" in word else f"{len(first)}F{int(word.split('F')[1]) - 1}" for word in last.split()]
    return "\n".join([*first, " ".join(words)])


def test_torch_refuses_its_own_text_of_1f1b() -> None:
    """The day it does not, the exception above goes."""
    order = theirs.Schedule1F1B(Stage(2, 2), 4).pipeline_order
    with pytest.raises(AssertionError, match="stage 1, microbatch 0 without first running Forward"):
        theirs._validate_schedule(order, 2, 2, 4)


@pytest.mark.parametrize(("kind", "ranks", "virtual", "m"), SIZES)
def test_torch_takes_our_text(kind: str, ranks: int, virtual: int, m: int, tmp_path: Path) -> None:
    """Its own check, and its own walk that puts sends and receives between the actions: it refuses what would hang."""
    schedule = make_schedule(kind, ranks, virtual, m)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule.csv)
    runtime = theirs._PipelineScheduleRuntime([Stage(ranks, ranks * virtual) for _ in range(virtual)], m)
    runtime._load_csv(str(path))
    assert tuple(runtime.stage_index_to_group_rank[s] for s in range(ranks * virtual)) == schedule.placement
    for rank, steps in enumerate(schedule.ranks):
        runs = [str(one) for one in runtime.pipeline_order_with_comms[rank] if one.is_compute_op]
        assert runs == [str(step) for step in steps]
    sends = sum("SEND_F" in str(one) for acts in runtime.pipeline_order_with_comms.values() for one in acts)
    assert sends == m * sum(a != b for a, b in pairwise(schedule.placement))


@pytest.mark.parametrize(("kind", "ranks", "virtual", "m"), SIZES)
def test_placement_and_text_agree(kind: str, ranks: int, virtual: int, m: int) -> None:
    schedule = make_schedule(kind, ranks, virtual, m)
    assert schedule.placement == placement(kind, ranks, virtual)
    assert Schedule.parse(str(schedule)) == schedule
    assert schedule.micro_batches == m
