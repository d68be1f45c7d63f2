"""The parity matrix: every model under every plan gives the plain model's loss, gradients and trained parameters."""

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
from tests.end_to_end.models import FAMILIES, ROWS, build
from tests.end_to_end.parity import DTYPES, cast, compare_all, double_throughout, reference
from tests.end_to_end.ranks import RankPool, RanksFailed
from tests.end_to_end.slow import slow_devices

PLANS: dict[str, tuple[int, dict[str, object]]] = {
    "ddp-2": (2, {"dp_replicate": 2}),
    "fsdp-4": (4, {"dp_shard": 4}),
    "tp-2": (2, {"tp": 2}),
    "tp-4": (4, {"tp": 4}),
    "fsdp-2 x tp-2": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp-2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "fsdp-2, 3 parts": (2, {"dp_shard": 2, "micro_batches": 3, "recompute": "full"}),
    "own-4": (4, {}),
    "own-3": (3, {}),
}
LIMITS = {
    "fp64": {"loss": 1e-6, "norm": 1e-10, "gradient": 1e-10, "parameter": 1e-10},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5, "parameter": float("inf")},
}
"""fp64 losses of transformers are computed in fp32 by the models themselves."""


@cache
def graph(family: str, recipe: str) -> ModelGraph:
    case = build(family, DTYPES[recipe])
    with double_throughout(family, recipe):
        return capture(case.model, cast(case.batch, DTYPES[recipe]), loss=case.loss, recipe=recipe, rows=2).graph


@cache
def plan(family: str, recipe: str, name: str) -> Plan:
    devices, fix = PLANS[name]
    return search(graph(family, recipe), slow_devices(devices), global_batch=ROWS, fix=fix)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    return {}


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, str, dict[str, float]]]]:
    """Collects every figure; printed at the end, with the largest."""
    rows: list[tuple[str, str, str, dict[str, float]]] = []
    yield rows
    for family, name, recipe, errors in rows:
        print(f"{family:8} {name:14} {recipe} " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    for recipe in LIMITS:
        found = [errors for _, _, r, errors in rows if r == recipe]
        if found:
            print(f"largest  {recipe} " + "  ".join(f"{k} {max(e[k] for e in found):.1e}" for k in found[0]))


ALWAYS = {"fp64": ("fsdp-2 x tp-2", "own-4"), "fp32": ("fsdp-2 x tp-2",)}
"""Plans that every family runs under in every test run. Of the others in fp64 each family takes every second one, its
neighbour in the list the rest, so that each plan runs with half of the families; `pytest -m exhaustive` runs what is
left, which in fp32 is the same programs in a coarser dtype."""


def matrix() -> Iterator[Any]:
    """(family, recipe, plans for as many ranks): one job of ranks runs them all."""
    for row, family in enumerate(FAMILIES):
        groups: dict[tuple[int, str, bool], list[str]] = {}
        for column, name in enumerate(PLANS):
            for recipe in LIMITS:
                often = name in ALWAYS[recipe] or (recipe == "fp64" and (row + column) % 2 == 0)
                groups.setdefault((PLANS[name][0], recipe, often), []).append(name)
        for (devices, recipe, often), names in groups.items():
            marks = [] if often else [pytest.mark.exhaustive]
            told = f"{family}-{devices}-{recipe}" + ("" if often else "-rest")
            yield pytest.param(family, recipe, tuple(names), marks=marks, id=told)


@pytest.mark.dist
@pytest.mark.parametrize(("family", "recipe", "names"), list(matrix()))
def test_parity(
    family: str,
    recipe: str,
    names: tuple[str, ...],
    ranks: RankPool,
    references: dict[tuple[str, str], Path],
    table: list[tuple[str, str, str, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if (family, recipe) not in references:
        references[family, recipe] = tmp_path_factory.mktemp("reference") / "trace.pt"
        reference(family, recipe, references[family, recipe])
    plans = {name: plan(family, recipe, name) for name in names}
    refused = {name for name, made in plans.items() if family == "t5" and made.file.job.micro_batches > 1}
    for name in refused:
        # T5 averages over its valid targets itself, and they are unequal here: no micro-batch mean would be right.
        with pytest.raises(RanksFailed, match="BatchError: loss: the model averages over valid targets itself"):
            _compare(ranks, family, recipe, [plans[name]], references)
    runs = {name: made for name, made in plans.items() if name not in refused}
    results = _compare(ranks, family, recipe, list(runs.values()), references) if runs else []
    assert all(result == results[0] for result in results), "every rank sees the same tensors"
    for (name, made), errors in zip(runs.items(), results[0] if results else [], strict=True):
        table.append((family, name, recipe, errors))
        for what, limit in LIMITS[recipe].items():
            assert errors[what] <= limit, f"{what} of {family} under {made}"


def _compare(
    ranks: RankPool, family: str, recipe: str, plans: list[Plan], references: dict[tuple[str, str], Path]
) -> list[list[dict[str, float]]]:
    """By rank and plan."""
    return ranks.run(
        f"{compare_all.__module__}:{compare_all.__name__}",
        ranks=plans[0].num_ranks,
        timeout_s=60.0 * (1 + len(plans)),
        family=family,
        recipe=recipe,
        plans=[made.content for made in plans],
        path=str(references[family, recipe]),
    )
