"""Random plans: any legal rule for any op on tp, any storage, and still the gradients of the plain model.

This is the strongest test of the room: layouts change at almost every op, so every redistribution, saved value and
half of a backward pass is exercised, in combinations that no search would choose.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hpsearch.capture import CapturedGraph, capture
from hpsearch.graph import Op, OpGraph, Rule
from hpsearch.layout import Mesh
from hpsearch.lower import lower
from hpsearch.lower.accounting import collectives_of
from hpsearch.plan import Plan
from hpsearch.plan.traffic import traffic
from tests.lower.models import Transformer, batch
from tests.lower.plans import cut_at_rest, make_plan
from tests.lower.reference import compare

ROWS = 8
MESHES = [
    Mesh.of(tp=2),
    Mesh.of(tp=4),
    Mesh.of(tp=2, dp_shard=2),
    Mesh.of(tp=2, dp_replicate=2),
    Mesh.of(tp=2, dp_replicate=2, dp_shard=2),
]
seen: Counter[str] = Counter()


def random_plan(captured: CapturedGraph, seed: int, meshes: Sequence[Mesh] = tuple(MESHES)) -> Plan:
    chance = random.Random(seed)
    mesh = chance.choice(meshes)
    eagerness = chance.choice([0.0, 0.3, 0.9])

    def choose(graph: OpGraph, op: Op, legal: list[Rule]) -> Rule:
        cuts = [rule for rule in legal if any(text != "R" for text in rule[0] + rule[1])]
        return chance.choice(cuts if cuts and chance.random() < eagerness else legal)

    model = captured.graph
    held = {}
    for graph in [*model.blocks.values(), model.outer]:
        for name, value in graph.values.items():
            if value.role == "param" or (value.role in ("input", "tangent") and graph is not model.outer):
                dims = [d for d, n in enumerate(value.fixed) if n and n % mesh.size("tp") == 0 and not value.per_row[d]]
                held[graph.name, name] = chance.choice(["R", *(f"S{d}" for d in dims)])
    axes = [axis for axis in ("dp_shard",) if axis in mesh.names and chance.random() < 0.7]
    return make_plan(
        model,
        mesh,
        ROWS,
        stored=cut_at_rest(*axes, dim=chance.choice([0, 0, 1])),
        held=held,
        choose=choose,
        residency=chance.choice(["step", "micro_batch"]),
        reduce=chance.choice(["step", "micro_batch"]),
        micro_batches=2,
        recompute=chance.choice([{}, {"Block": "full"}]),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def captured(request: pytest.FixtureRequest) -> tuple[Transformer, CapturedGraph]:
    model = Transformer(tied=request.param)
    return model, capture(model, batch(ROWS), recipe="fp64")


def entries(found: Any) -> Counter[tuple[Any, ...]]:
    counted: Counter[tuple[Any, ...]] = Counter()
    for e in found:
        counted[e.kind, e.axis, e.phase, e.what, e.dtype, e.nbytes] += e.calls
    return counted


@pytest.mark.parametrize("seed", range(8))
def test_random_plan(captured: tuple[Transformer, CapturedGraph], seed: int) -> None:
    model, graph = captured
    plan = random_plan(graph, seed)
    program = lower(graph, plan)
    stated = traffic(plan.file, graph.graph, plan.mesh, ("float64", "float64"), lambda c: 0.0)
    assert entries(collectives_of(program)) == entries(stated)
    seen.update(e.kind for e in stated)
    found = compare(model, [batch(ROWS, i) for i in range(2)], graph, program)
    assert max(found.loss, found.gradient) <= 1e-10


def test_random_plans_use_every_collective() -> None:
    assert set(seen) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
