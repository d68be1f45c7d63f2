"""Expert parallelism in the search: degrees tried, states that fit together, pins that cannot be."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hpsearch.capture import capture
from hpsearch.cost import Job, build, recipe_of
from hpsearch.errors import LegalityError, LoweringError
from hpsearch.graph import ModelGraph
from hpsearch.graph.routed import ROUTE
from hpsearch.layout import Layout, Mesh
from hpsearch.lower import lower
from hpsearch.plan import Plan
from hpsearch.search import search
from hpsearch.strategy import enumerate_space, propagate_all
from tests.end_to_end import experts  # noqa: F401  (adds its families)
from tests.end_to_end.models import ROWS
from tests.end_to_end.models import build as model_of
from tests.end_to_end.slow import slow_devices


@cache
def graph() -> ModelGraph:
    case = model_of("mixtral", torch.float32)
    return capture(case.model, case.batch, recipe="fp32", rows=2).graph


def test_rows_of_experts_keep_their_cut() -> None:
    """On an axis of data counts are addends and weights whole; on one of experts both are cut; nothing moves rows."""
    followed = propagate_all(graph(), graph().rows)
    (block,) = graph().blocks.values()
    (route,) = [op for op in block.ops if op.target == ROUTE]
    on_data, on_experts = followed["batch"][block.name], followed["experts"][block.name]
    assert (str(on_data.values[route.outputs[1]]), str(on_experts.values[route.outputs[1]])) == ("P", "S0")
    weights = [value for name, value in block.params.items() if name.startswith("mlp.experts")]
    assert {str(on_data.values[w]) for w in weights} == {"R"}
    assert {str(on_experts.values[w]) for w in weights} == {"S0"}
    grads = [block.param_grads[name] for name in block.params if name.startswith("mlp.experts")]
    assert {str(on_data.values[g]) for g in grads} == {"P"}, "summed over the ranks of a data axis"
    assert {str(on_experts.values[g]) for g in grads} == {"S0"}, "already of the tokens of all ranks"
    for placed in (on_data, on_experts):
        for op in block.ops:
            for value, read in zip(op.inputs, placed.rules[op.name][0], strict=True):
                assert value not in block.routed or read == str(placed.values[value])


def test_experts_are_at_rest_where_they_are_used() -> None:
    mesh = Mesh.of(ep=2, dp_shard=2)
    space = enumerate_space(graph(), 1, ep=2)
    table = build(space, slow_devices(4), mesh, Job(ROWS, 1, recipe_of("fp32"), "adamw"), float("inf"))
    (block,) = graph().blocks.values()
    stored = {name: {str(s.stored) for s in table.storages[block.name, value]} for name, value in block.params.items()}
    assert stored["mlp.experts.down_proj"] == {"ep:S0", "ep:S0 dp_shard:S0"}
    assert stored["self_attn.q_proj.weight"] == {"R", "ep:S0 dp_shard:S0"}


def test_every_degree_is_tried_and_the_best_is_found() -> None:
    """The unpinned search is as good as the best of all pins, and its bound holds for each."""
    free = search(graph(), slow_devices(2), global_batch=ROWS, fix={"micro_batches": 1, "recompute": "none"})
    pinned = []
    for fix in ({"ep": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}):
        more = {"micro_batches": 1, "recompute": "none", **fix}
        pinned.append(search(graph(), slow_devices(2), global_batch=ROWS, fix=more).file.certificate)
    best = min(found.objective_s for found in pinned)
    assert free.file.certificate.objective_s == pytest.approx(best, rel=1e-9)
    assert free.file.certificate.bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ep", "message"), [(3, "expected a divisor of the 4 experts"), (8, r"Legal ep .*\[1, 2, 4\]")]
)
def test_experts_that_do_not_divide_are_refused(ep: int, message: str) -> None:
    with pytest.raises(LegalityError, match=message):
        search(graph(), slow_devices(24), global_batch=24, fix={"ep": ep})


def test_a_rule_that_does_not_go_with_the_routers_is_refused() -> None:
    plan = search(graph(), slow_devices(2), global_batch=ROWS, fix={"ep": 2, "micro_batches": 1})
    (block,) = graph().blocks.values()
    placements = {name: dict(of) for name, of in plan.file.placements.items()}
    combine = next(op for op in block.ops if op.target == "hpsearch.combine.default")
    assert placements[block.name][combine.name] == {"ep": "S0,S0,S0,S0->S0"}
    assert Layout.parse(plan.parameter("model.layers.0.mlp.experts.down_proj").used) == Layout.parse("ep:S0")
    placements[block.name][combine.name] = {"ep": "S0,R,S0,S0->P"}
    wrong = Plan(plan.file.model_copy(update={"placements": placements}))
    case = model_of("mixtral", torch.float32)
    with pytest.raises(LoweringError, match="expected its tokens S0 on ep, as they were routed, but found P"):
        lower(capture(case.model, case.batch, recipe="fp32", rows=ROWS), wrong)
