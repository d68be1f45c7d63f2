"""Stages of a pipeline, all in one process: what they make, that no work is done twice, and what they keep."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hpsearch.capture import CapturedGraph, capture
from hpsearch.lower import PipelineProgram, lower
from hpsearch.lower.stage import BoundStage
from hpsearch.plan import Plan
from hpsearch.plan.stages import even, split
from hpsearch.schedule import KINDS
from hpsearch.search import search
from tests.end_to_end.models import ROWS, Case, build
from tests.end_to_end.parity import NOISE, plain_loss, worst
from tests.end_to_end.slow import slow_devices
from tests.lower.stages import Played
from tests.search.test_memory_promise import Alive


@cache
def case_of(family: str, dtype: torch.dtype) -> Case:
    return build(family, dtype)


@cache
def graph_of(family: str, recipe: str, rows: int = 3) -> CapturedGraph:
    case = case_of(family, torch.float64 if recipe == "fp64" else torch.float32)
    return capture(case.model, _cast(case.batch, recipe), loss=case.loss, recipe=recipe, rows=rows)


def _cast(batch: Any, recipe: str) -> Any:
    to = torch.float64 if recipe == "fp64" else torch.float32
    one = lambda v: v.to(to) if isinstance(v, Tensor) and v.is_floating_point() else v  # noqa: E731
    return {k: one(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(one(v) for v in batch)


def made(family: str, recipe: str, fix: dict[str, object]) -> tuple[Plan, PipelineProgram]:
    plan = search(graph_of(family, recipe).graph, slow_devices(int(str(fix["pp"]))), global_batch=ROWS, fix=fix)
    program = lower(graph_of(family, recipe, plan.micro_batch_rows), plan)
    assert isinstance(program, PipelineProgram)
    return plan, program


def inputs(case: Case, program: PipelineProgram, recipe: str) -> list[dict[str, Tensor]]:
    """The micro-batches, by leaf; the count of valid targets is that of the batch."""
    batch = _cast(case.batch, recipe)
    named = batch if isinstance(batch, dict) else {f"arg{i}": t for i, t in enumerate(batch)}
    found: list[dict[str, Tensor]] = [{} for _ in range(program.micro_batches)]
    for slot in program.inputs:
        if slot.name == "num_items_in_batch":
            pieces = [(named["labels"][:, 1:] != -100).sum()] * program.micro_batches
        else:
            pieces = list(named[slot.name].chunk(program.micro_batches))
        for one, piece in zip(found, pieces, strict=True):
            one[slot.name] = piece.to(slot.dtype)
    return found


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers())


def share_of(program: PipelineProgram) -> float:
    return 1.0 if program.loss_reduction in ("sum", "sum_over_count") else 1.0 / program.micro_batches


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_gives_the_plain_models_gradients(kind: str) -> None:
    """Three towers on stages that are cut unevenly, with what vision gives crossing none or several of them."""
    virtual = KINDS[kind].least_virtual
    plan, program = made("towers", "fp64", {"pp": 2, "schedule": kind, "micro_batches": 4})
    case = case_of("towers", torch.float64)
    loss, grads = Played(program).step(*state(case.model), inputs(case, program, "fp64"), share_of(program))
    case.model.zero_grad()
    expected = plain_loss(case.model, _cast(case.batch, "fp64"), case.loss)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert len(program.stages) == 2 * virtual == len(plan.file.pipeline.stages)  # type: ignore[union-attr]
    gradients = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    assert worst("gradient", grads, gradients, NOISE["fp64"])["gradient"] <= 1e-10


class Ops(TorchDispatchMode):
    """How often each op runs while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(stage: BoundStage, parts: list[str], number: int, taken: list[Tensor], grads: list[Tensor]) -> Any:
    """(FLOPs, calls of each op) of parts of the backward of one micro-batch whose forward is done first."""
    flops, calls = 0, Counter[str]()
    for part in parts:
        with FlopCounterMode(display=False) as counter, Ops() as ops:
            if part == "B":
                stage.backward_one(number, grads, 1.0)
            elif part == "I":
                stage.backward_input_one(number, grads, 1.0)
            else:
                stage.backward_weight_one(number)
        flops += counter.get_total_flops()
        calls += ops.calls
    return flops, calls


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_halves_of_backward_do_its_work_once(family: str, recompute: str) -> None:
    """FLOPs and calls of every op: those of the input part and of the weight part are those of the whole."""
    _, program = made(family, "fp64", {"pp": 2, "micro_batches": 4, "recompute": recompute})
    case = case_of(family, torch.float64)
    params, buffers = state(case.model)
    batches = inputs(case, program, "fp64")
    found: dict[tuple[int, str], Any] = {}
    for how in ("B", "IW"):
        stages = [BoundStage(stage, {}, {}, torch.device("cpu")) for stage in program.stages]
        for stage in stages:
            stage.start(params, buffers)
        given = stages[0].forward_one(0, batches[0], [])
        stages[1].forward_one(0, batches[0], given)
        tangents = [torch.randn(p.shape, dtype=p.dtype) for p in stages[0].ends.takes_back]
        for index, grads in ((1, []), (0, tangents)):
            found[index, how] = counted(stages[index], list(how), 0, given, grads)
    for index in (0, 1):
        (flops, calls), (whole_flops, whole_calls) = found[index, "IW"], found[index, "B"]
        assert flops == whole_flops > 0
        assert calls == whole_calls


@pytest.mark.parametrize(
    ("family", "fix"),
    [
        ("gpt2_deep", {"pp": 2, "micro_batches": 4, "cut": "3+2", "recompute": "none"}),
        ("llama_deep", {"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "recompute": "full"}),
        ("llama_deep", {"pp": 2, "micro_batches": 4, "schedule": "gpipe", "recompute": "none"}),
        ("towers", {"pp": 2, "micro_batches": 4, "schedule": "zbv", "recompute": "none"}),
    ],
    ids=str,
)
def test_measured_bytes_stay_within_the_plan(family: str, fix: dict[str, object]) -> None:
    """Every pipeline rank at its fullest moment, activations in flight and what waits to be sent among them."""
    plan, program = made(family, "fp32", fix)
    case = case_of(family, torch.float32)
    alive = [Alive() for _ in program.schedule.ranks]
    played = Played(program, lambda rank: alive[rank])
    played.step(*state(case.model), inputs(case, program, "fp32"), share_of(program))
    entry, predicted = plan.file.pipeline, plan.file.predicted
    assert entry is not None
    for rank, one in enumerate(alive):
        held = [entry.stages[s].bytes for s, holder in enumerate(program.schedule.placement) if holder == rank]
        own = sum(stage[name] for stage in held for name in ("parameters", "optimizer"))
        most = sum(sum(stage.values()) for stage in held)
        measured = own + one.peak
        print(f"{family} {fix} rank {rank}: measured / predicted = {measured / most:.3f}")
        assert measured <= most
    assert max(sum(s.bytes.values()) for s in entry.stages) <= predicted.peak_bytes


def test_every_step_is_on_a_stage_and_copies_cost_no_parameters() -> None:
    """Of each family and number of stages: steps placed once, or made again from the batch alone."""
    for family in ("gpt2_deep", "t5_deep", "towers", "llama_deep"):
        graph = graph_of(family, "fp64").graph
        calls = sum(1 for call in graph.outer.calls if call.phase == "forward")
        for count in (1, 2, 3, calls):
            stages = split(graph, even(calls, count))
            times = Counter(step.name for stage in stages for step in stage.graph.outer.steps)
            assert set(times) <= {step.name for step in graph.outer.steps}
            for stage in stages:
                own = set(stage.graph.outer.params.values())
                for op in stage.graph.outer.ops:
                    if times[op.name] > 1:
                        assert not own & set(op.inputs) or op.outputs[0] in graph.outer.aliases
            sent = [stage.gives for stage in stages[:-1]]
            assert sent == [stage.takes for stage in stages[1:]]
            assert [s.gives_back for s in stages[1:]] == [s.takes_back for s in stages[:-1]]
