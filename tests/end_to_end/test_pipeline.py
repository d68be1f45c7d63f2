"""Pipelines on real ranks: loss, every gradient, the norm and trained parameters are the plain model's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpsearch.capture import capture
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end.models import ROWS, build
from tests.end_to_end.parity import DTYPES, cast, double_throughout, reference
from tests.end_to_end.pipelined import compare
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices

RECIPE = "fp64"
LIMITS = {"loss": 1e-6, "norm": 1e-10, "gradient": 1e-10, "parameter": 1e-10}
"""fp64 losses of transformers are computed in fp32 by the models themselves."""

CASES: dict[str, tuple[str, int, dict[str, object]]] = {
    "llama, pp": ("llama", 2, {"pp": 2, "micro_batches": 3}),
    "gpt2, tied, pp": ("gpt2", 2, {"pp": 2, "micro_batches": 4}),
}


@cache
def graph(family: str) -> ModelGraph:
    case = build(family, DTYPES[RECIPE])
    with double_throughout(family, RECIPE):
        return capture(case.model, cast(case.batch, DTYPES[RECIPE]), loss=case.loss, recipe=RECIPE, rows=2).graph


@cache
def plan(family: str, devices: int, fix: tuple[tuple[str, object], ...]) -> Plan:
    return search(graph(family), slow_devices(devices), global_batch=ROWS, fix=dict(fix))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, dict[str, float]]]]:
    """Collects every figure; printed at the end."""
    rows: list[tuple[str, dict[str, float]]] = []
    yield rows
    for name, errors in rows:
        print(f"{name:40} " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()))


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_parity(
    name: str,
    ranks: RankPool,
    references: dict[str, Path],
    table: list[tuple[str, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    family, devices, fix = CASES[name]
    if family not in references:
        references[family] = tmp_path_factory.mktemp("reference") / "trace.pt"
        reference(family, RECIPE, references[family])
    made = plan(family, devices, tuple(fix.items()))
    check(ranks, family, made, references[family], name, table)


def check(
    ranks: RankPool, family: str, made: Plan, path: Path, name: str, table: list[tuple[str, dict[str, float]]]
) -> None:
    job = f"{compare.__module__}:{compare.__name__}"
    arguments: dict[str, Any] = {"family": family, "recipe": RECIPE, "plan": made.content, "path": str(path)}
    results = ranks.run(job, ranks=made.num_ranks, **arguments)
    held = {name for _, names in results for name in names}
    assert held == set(graph(family).params), "every parameter is on some rank"
    errors = {what: max(found[what] for found, _ in results) for what in LIMITS}
    table.append((name, errors))
    for what, limit in LIMITS.items():
        assert errors[what] <= limit, f"{what} of {family} under {made}"
