"""Pipelines on real ranks: loss, every gradient, the norm and trained parameters are the plain model's.

Plans of one model on as many ranks are one job. `pytest -m exhaustive` runs every kind of schedule on every model with
2 and with 4 stages, equal and uneven cuts, alone and with FSDP and TP inside a stage. All of its 192 plans were run,
on 2026-11-30 and 2026-12-01: gradients within 3.5e-15, parameters within 8.4e-13 where figures were kept (not of four
stages and of Llama with FSDP, which are within LIMITS); of the three towers under TP 1.5e-7 and 5.9e-6 (ROUNDED).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpsearch.capture import capture
from hpsearch.graph import ModelGraph
from hpsearch.plan import Plan
from hpsearch.schedule import KINDS
from hpsearch.search import search
from tests.end_to_end.models import DEEP, ROWS, build
from tests.end_to_end.parity import DTYPES, cast, double_throughout, reference
from tests.end_to_end.pipelined import checkpoints, compare, partly_frozen
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices

RECIPE = "fp64"
LIMITS = {"loss": 1e-6, "norm": 1e-10, "gradient": 1e-10, "parameter": 1e-10}
"""fp64 losses of transformers are computed in fp32 by the models themselves."""
ROUNDED = {"loss": 1e-6, "norm": 1e-5, "gradient": 1e-5, "parameter": 1e-4}
"""Where tp cuts the features of a norm, which sums in fp32 by itself (13 tokens do not divide by 2): gradients 1.5e-7,
the same without stages."""

Fixes = tuple[dict[str, object], ...]
PAIRWISE: dict[str, tuple[str, int, Fixes]] = {
    "gpt2, tied, 2 ranks": (
        "gpt2_deep",
        2,
        (
            {"pp": 2, "micro_batches": 3, "cut": "1+4"},
            {"pp": 2, "micro_batches": 1, "schedule": "gpipe"},
            {"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "recompute": "full"},
            {"pp": 2, "micro_batches": 4, "vpp": 2},
            {"pp": 2, "micro_batches": 3, "schedule": "zbv"},
            {"pp": 2, "micro_batches": 4, "schedule": "dualpipev", "cut": "2+1+1+1"},
        ),
    ),
    "llama, 4 ranks": (
        "llama_deep",
        4,
        (
            {"pp": 4, "micro_batches": 4, "schedule": "zb-h1"},
            {"pp": 2, "dp_shard": 2, "micro_batches": 2, "schedule": "interleaved-zb"},
            {"pp": 2, "tp": 2, "micro_batches": 3, "cut": "3+2"},
        ),
    ),
    "t5, whose encoder's output crosses three stages": (
        "t5_deep",
        2,
        ({"pp": 2, "micro_batches": 4, "schedule": "interleaved-zb"},),
    ),
    "three towers": (
        "towers",
        2,
        ({"pp": 2, "micro_batches": 3, "cut": "1+4"}, {"pp": 2, "micro_batches": 2, "schedule": "zbv"}),
    ),
}


@cache
def graph(family: str) -> ModelGraph:
    case = build(family, DTYPES[RECIPE])
    with double_throughout(family, RECIPE):
        return capture(case.model, cast(case.batch, DTYPES[RECIPE]), loss=case.loss, recipe=RECIPE, rows=2).graph


def plan(family: str, devices: int, fix: dict[str, object]) -> Plan:
    return search(graph(family), slow_devices(devices), global_batch=ROWS, fix=fix)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, Plan, dict[str, float]]]]:
    """Collects every figure; printed at the end, with the largest."""
    rows: list[tuple[str, Plan, dict[str, float]]] = []
    yield rows
    for family, made, errors in rows:
        pins = ",".join(f"{k}={v}" for k, v in made.file.job.fix.items())
        print(f"{family:12} {pins:60} " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    if rows:
        print("largest " + "  ".join(f"{k} {max(errors[k] for _, _, errors in rows):.1e}" for k in LIMITS))


@pytest.mark.dist
@pytest.mark.parametrize("name", PAIRWISE)
def test_parity(
    name: str,
    ranks: RankPool,
    references: dict[str, Path],
    table: list[tuple[str, Plan, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    family, devices, fixes = PAIRWISE[name]
    check(ranks, family, [plan(family, devices, fix) for fix in fixes], references, table, tmp_path_factory)


UNEVEN = {2: "1+4", 4: "1+2+1+1"}
INSIDE: dict[str, tuple[int, dict[str, object]]] = {
    "pp=2": (2, {"pp": 2}),
    "pp=4": (4, {"pp": 4}),
    "pp=2 x dp_shard=2": (4, {"pp": 2, "dp_shard": 2}),
    "pp=2 x tp=2": (4, {"pp": 2, "tp": 2}),
}


def matrix(family: str, inside: str) -> list[dict[str, object]]:
    """Every kind of schedule, with an equal and with an uneven cut."""
    found: list[dict[str, object]] = []
    blocks = sum(1 for call in graph(family).outer.calls if call.phase == "forward")
    for number, kind in enumerate(KINDS):
        ranks = int(str(INSIDE[inside][1]["pp"]))
        stages = ranks * KINDS[kind].least_virtual
        if stages > blocks:
            continue
        cut = UNEVEN[stages].rpartition("+")[0] + f"+{blocks - sum(map(int, UNEVEN[stages].split('+')[:-1]))}"
        many = 6 if "dp_shard" in inside or (ranks == 2 and kind != "dualpipev") else 4
        pins: dict[str, object] = {**INSIDE[inside][1], "schedule": kind, "micro_batches": many}
        found.append({**pins, "recompute": ("none", "full")[number % 2]})
        found.append({**pins, "cut": cut})
    return found


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("family", DEEP)
def test_the_whole_matrix(
    family: str,
    inside: str,
    ranks: RankPool,
    references: dict[str, Path],
    table: list[tuple[str, Plan, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plans = [plan(family, INSIDE[inside][0], fix) for fix in matrix(family, inside)]
    limits = ROUNDED if family == "towers" and "tp" in inside else LIMITS
    check(ranks, family, plans, references, table, tmp_path_factory, limits)


def check(
    ranks: RankPool,
    family: str,
    plans: list[Plan],
    references: dict[str, Path],
    table: list[tuple[str, Plan, dict[str, float]]],
    tmp_path_factory: pytest.TempPathFactory,
    limits: dict[str, float] = LIMITS,
) -> None:
    if family not in references:
        references[family] = tmp_path_factory.mktemp("reference") / "trace.pt"
        reference(family, RECIPE, references[family])
    job = f"{compare.__module__}:{compare.__name__}"
    content = [made.content for made in plans]
    arguments: dict[str, Any] = {
        "family": family, "recipe": RECIPE, "plans": content, "path": str(references[family]),
    }  # fmt: skip
    results = ranks.run(job, ranks=plans[0].num_ranks, timeout_s=60.0 * (1 + len(plans)), **arguments)
    for made, found in zip(plans, zip(*results, strict=True), strict=True):
        assert {name for _, names in found for name in names} == set(graph(family).params), "one is on no rank"
        errors = {what: max(one[what] for one, _ in found) for what in (*LIMITS, "cpu_s")}
        table.append((family, made, errors))
        for what, limit in limits.items():
            assert errors[what] <= limit, f"{what} of {family} under {made}: {made.file.pipeline}"


@pytest.mark.dist
def test_a_stage_may_have_nothing_to_train(ranks: RankPool) -> None:
    """Both ways to train; the plan is found by `compile` on the ranks themselves."""
    found = ranks.run(f"{partly_frozen.__module__}:{partly_frozen.__name__}", ranks=2)
    for rank, errors in enumerate(found):
        for way in ("step", "call"):
            assert errors[f"{way} loss"] <= 1e-10
            assert (errors[f"{way} gradients"] > 0) == (rank == 1)
            assert errors.get(f"{way} gradient", 0.0) <= 1e-10


@pytest.mark.dist
def test_checkpoints_are_the_same_with_and_without_stages(ranks: RankPool, tmp_path: Path) -> None:
    """Parameters and optimizer state under the model's names, whatever rank held them; GPT-2's head is tied."""
    pipelined = plan("gpt2", 2, {"pp": 2, "micro_batches": 2}).content
    flat = plan("gpt2", 2, {"dp_shard": 2, "micro_batches": 2}).content
    job = f"{checkpoints.__module__}:{checkpoints.__name__}"
    for first, second in ((pipelined, flat), (flat, pipelined)):
        folder = str(tmp_path / str(first == flat))
        found = ranks.run(job, ranks=2, family="gpt2", recipe=RECIPE, first=first, second=second, folder=folder)
        model = build("gpt2", DTYPES[RECIPE]).model
        assert sorted(found[0]["names"]) == sorted(model.state_dict())
        assert found[1]["names"] == []
        for losses in (one["losses"] for one in found):
            for name in ("same, after", "other, after"):
                assert losses[name] == pytest.approx(losses["after"], rel=1e-7)
            assert losses["other, dict"] == pytest.approx(losses["dict"], rel=1e-7)
