"""The folded problem against the unrolled model: equal seconds for random choices, and bytes that add up."""

from __future__ import annotations

import random

import pytest

from hpsearch.cost import CostTable, Job, build, recipe_of
from hpsearch.layout import Mesh
from hpsearch.search.memory import bytes_by_category
from hpsearch.strategy import enumerate_space
from tests.search.naive import hideable_seconds, naive_seconds
from tests.search.toy import toy_cluster, toy_model

MESHES = [
    {"dp_shard": 4},
    {"tp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
]


def table_of(degrees: dict[str, int], micro_batches: int, recompute: bool, depth: int = 3) -> CostTable:
    model = toy_model(depth)
    mesh = Mesh.of(**degrees)
    job = Job(8, micro_batches, recipe_of("fp32"), "adamw", frozenset({"Block"} if recompute else ()))
    return build(enumerate_space(model, mesh.size("tp")), toy_cluster(), mesh, job, 1e12)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_folded_seconds_are_the_unrolled_models(degrees: dict[str, int], micro_batches: int, recompute: bool) -> None:
    table = table_of(degrees, micro_batches, recompute)
    rng = random.Random(7)
    priced = 0
    while priced < 40:
        choice = [rng.randrange(size) for size in table.problem.sizes]
        found = table.problem.evaluate(choice)
        if found == float("inf"):
            continue
        priced += 1
        assert found == pytest.approx(naive_seconds(table, choice) + hideable_seconds(table, choice), rel=1e-9)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_memory_row_is_the_sum_of_the_categories(degrees: dict[str, int]) -> None:
    table = table_of(degrees, 2, False)
    rng = random.Random(3)
    for _ in range(20):
        choice = [rng.randrange(size) for size in table.problem.sizes]
        assert table.problem.rows[0].total(choice) == pytest.approx(sum(bytes_by_category(table, choice).values()))


def test_depth_adds_calls_not_nodes() -> None:
    shallow, deep = table_of({"tp": 4}, 1, False, depth=2), table_of({"tp": 4}, 1, False, depth=50)
    assert shallow.problem.sizes == deep.problem.sizes
    assert len(shallow.problem.flows) == len(deep.problem.flows)
