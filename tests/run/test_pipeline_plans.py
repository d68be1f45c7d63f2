"""Plans with a pipeline: what is legal, what a hand may write, what is refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from hpsearch.capture import CapturedGraph, capture
from hpsearch.errors import InfeasibleError, LegalityError, PlanError
from hpsearch.lower import PipelineProgram, lower
from hpsearch.plan import Plan
from hpsearch.run.asked import Asked
from hpsearch.run.choose import pins
from hpsearch.search import search
from hpsearch.search.pipeline import balanced
from tests.end_to_end.models import ROWS, build
from tests.end_to_end.slow import slow_devices
from tests.search.toy import toy_cluster


@cache
def captured(family: str = "gpt2_deep", rows: int = 4) -> CapturedGraph:
    case = build(family, torch.float32)
    return capture(case.model, case.batch, loss=case.loss, recipe="fp32", rows=rows)


def found(devices: int = 2, family: str = "gpt2_deep", **fix: object) -> Plan:
    return search(captured(family).graph, slow_devices(devices), global_batch=ROWS, fix={"pp": 2, **fix})


@cache
def one() -> Plan:
    return found(micro_batches=3, cut="3+2")


def edited(change: Callable[[Any], None]) -> Plan:
    tree = json.loads(one().content)
    change(tree)
    return Plan.from_bytes(json.dumps(tree).encode(), "plan.json", captured().graph)


def test_the_file_says_what_runs() -> None:
    entry = one().file.pipeline
    assert entry is not None
    assert (entry.ranks, entry.kind, entry.tier) == (2, "1f1b", "node")
    assert entry.actions == ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert [stage.blocks for stage in entry.stages] == [
        ("transformer.h.0", "transformer.h.1", "transformer.h.2"),
        ("transformer.h.3", "transformer.h.4"),
    ]
    assert entry.stages[0].parameters == ("transformer.wte.weight", "transformer.wpe.weight")
    assert entry.stages[1].parameters == ("transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias")
    assert one().num_ranks == 2
    assert one().layout_text == "pp=2"
    assert found(4, tp=2, micro_batches=3).layout_text == "pp=2 x tp=2"


def test_equal_questions_equal_bytes() -> None:
    assert found(micro_batches=3, cut="3+2").content == one().content
    assert Plan.from_bytes(one().content, "plan", captured().graph) == one()


def test_a_plan_without_stages_has_no_word_of_them() -> None:
    plan = search(captured().graph, slow_devices(2), global_batch=ROWS)
    assert b'"pipeline"' not in plan.content
    assert Plan.from_bytes(plan.content).file.pipeline is None


def test_pins_lead_back_to_the_plan() -> None:
    graph, plan = captured().graph, found(4, schedule="zb-h1", dp_shard=2)
    again = search(graph, slow_devices(4), global_batch=ROWS, fix=pins(plan))
    assert again.file.pipeline is not None
    assert plan.file.pipeline is not None
    assert again.file.pipeline.actions == plan.file.pipeline.actions
    assert again.file.parameters == plan.file.parameters
    Asked({"pp": 2, "schedule": "zb-h1"}).check(plan, "plan")
    with pytest.raises(PlanError, match="pp=4 was asked for, but the plan has pp=2"):
        Asked({"pp": 4}).check(plan, "plan")


def actions(rank: int, text: str) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        tree["pipeline"]["actions"][rank] = text

    return change


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "everybody waits": (
        actions(0, "0B0 0F0 0F1 0F2 0B1 0B2"),
        r"nobody goes on: rank 0 \(stage 0\) waits at 0B0 for 1B0 of rank 1; rank 1 \(stage 1\) waits at 1F0 for 0F0",
    ),
    "one is missing": (
        actions(1, "1F0 1B0 1F1 1F2 1B2"),
        r"rank 1, stage 1: expected one forward and one backward .* of micro-batch 1, but found 1 x 1F1",
    ),
    "twice": (actions(0, "0F0 0F0 0F1 0B0 0F2 0B1 0B2"), r"rank 0, stage 0: .*found 2 x 0F0, 1 x 0B0"),
    "half a backward": (actions(0, "0F0 0F1 0I0 0F2 0B1 0B2"), r"found 1 x 0F0, 1 x 0I0"),
    "no action": (actions(0, "0F0 0X1"), r"action '0X1': expected stage, kind"),
    "a stage on two ranks": (
        actions(1, "1F0 1B0 1F1 1B1 1F2 1B2 0F3 0B3"),
        "expected one rank to hold stage 0, but ranks 0 and 1 do",
    ),
    "other micro-batches": (
        lambda tree: tree["job"].update(micro_batches=2) or tree["inputs"][0].update(shape=[6, 8]),
        "expected 2 micro-batches .*but found 3",
    ),
    "a line too many": (lambda tree: tree["pipeline"]["actions"].append(""), "expected one line for each of 2 ranks"),
    "blocks out of order": (
        lambda tree: tree["pipeline"]["stages"][0].update(
            blocks=["transformer.h.0", "transformer.h.2", "transformer.h.1"]
        ),
        r"pipeline.stages\[0\].blocks: expected transformer.h.0, transformer.h.1, transformer.h.2, but found",
    ),
    "a block lost": (
        lambda tree: tree["pipeline"]["stages"][0].update(blocks=["transformer.h.0", "transformer.h.1"]),
        r"cut 2\+2: expected 2 numbers of at least 1 that add up to the 5 blocks",
    ),
    "a parameter elsewhere": (
        lambda tree: tree["pipeline"]["stages"][1].update(parameters=["transformer.ln_f.weight"]),
        r"pipeline.stages\[1\].parameters: expected transformer.wte.weight",
    ),
    "other ranks": (lambda tree: tree["pipeline"].update(ranks=4), "pp=4 gives 4"),
    "unknown kind": (lambda tree: tree["pipeline"].update(kind="2f2b"), "pipeline.kind: unknown '2f2b'"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_that_are_refused(name: str) -> None:
    change, message = EDITS[name]
    with pytest.raises(PlanError, match=message):
        edited(change)


def test_edits_that_run() -> None:
    """Another order, and a block moved to its neighbour."""
    other = edited(actions(0, "0F0 0F1 0F2 0I0 0B1 0I2 0W2 0W0"))
    assert other.is_edited

    def move(tree: Any) -> None:
        first, second = tree["pipeline"]["stages"]
        second["blocks"].insert(0, first["blocks"].pop())
        first["takes_back"], second["takes"] = ["block_backward_2.0"], ["block_1.0"]

    moved = edited(move)
    program = lower(captured(), moved)
    assert isinstance(program, PipelineProgram)
    assert [len(stage.prefixes) for stage in program.stages] == [2, 3]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"pp": 1, "vpp": 2}, "fix vpp=2: expected pp of at least 2 beside it"),
    ({"schedule": "1f2b"}, "fix schedule=1f2b: expected one of gpipe, 1f1b"),
    ({"cut": "4+2"}, r"cut 4\+2: expected 2 numbers of at least 1 that add up to the 5 blocks .*For example 3\+2"),
    ({"cut": "2+2+1"}, "expected 2 numbers for 2 ranks with 1 stage each"),
    ({"pp": 3}, "fix pp=3: expected a divisor of the 2 devices"),
    ({"vpp": 3}, "6 stages of GPT2LMHeadModel: expected at least as many repeated blocks as stages, but found 5"),
    ({"micro_batches": 1}, "schedule 1f1b, micro_batches = 1: expected at least 2 for 2 ranks, .*gpipe takes any"),
    ({"micro_batches": 3, "vpp": 2}, "schedule interleaved, micro_batches = 3: expected a multiple of the 2 ranks"),
    ({"schedule": "dualpipev", "micro_batches": 3}, "schedule dualpipev, micro_batches = 3: expected at least 4"),
    ({"schedule": "1f1b", "vpp": 2}, "schedule 1f1b, virtual = 2: expected 1 stage on each rank"),
    ({"micro_batches": 5}, "expected a multiple of micro_batches x data ranks = 5 x 1 = 5"),
]


@pytest.mark.parametrize(("fix", "message"), REFUSED, ids=str)
def test_pins_that_are_refused(fix: dict[str, object], message: str) -> None:
    with pytest.raises(LegalityError, match=message):
        found(**fix)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(InfeasibleError, match=r"within 0.36 MB a device, but at least 1\.\d+ MB are needed \(pp=2"):
        search(captured().graph, toy_cluster(devices=2, memory_bytes=400_000), global_batch=ROWS, fix={"pp": 2})


def test_stages_lift_what_one_device_does_not_hold() -> None:
    """Each device holds its own stages' states: less memory is enough than for the same rows without a pipeline."""
    graph, least = captured().graph, {}
    for pp, fix in ((1, {"dp_replicate": 2, "micro_batches": 6}), (2, {"pp": 2, "micro_batches": 12})):
        for memory in range(1_200_000, 4_500_000, 300_000):
            pinned: dict[str, object] = {**fix, "recompute": "none"}
            try:
                plan = search(graph, toy_cluster(devices=2, memory_bytes=memory), global_batch=ROWS, fix=pinned)
            except InfeasibleError:
                continue
            least[pp] = plan.file.predicted.peak_bytes
            assert least[pp] <= memory
            break
    assert least[2] < 0.8 * least[1]


def test_the_longest_stage_is_as_short_as_can_be() -> None:
    assert balanced([1.0] * 6, 2, [0.0, 2.0]) == (4, 2)
    assert balanced([3.0, 1.0, 1.0, 1.0], 2, [0.0, 0.0]) == (1, 3)
    assert balanced([1.0] * 4, 4, [0.0, 9.0]) == (1, 1, 1, 1)


def test_the_certificate_is_of_the_pinned_pipeline() -> None:
    proof = one().file.certificate
    assert proof.space.startswith("pipelines of 2 ranks, 1 stages on each, 1f1b, blocks cut as pinned")
    assert 0 < proof.bound_s <= proof.objective_s == one().file.predicted.step_s
