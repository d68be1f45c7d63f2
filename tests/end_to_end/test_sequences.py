"""Cut sequences give the plain model's loss, gradients and trained parameters: every way of attention under causal,
windowed and block-diagonal masks, with two heads of keys, beside other axes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hpsearch.capture import capture
from hpsearch.graph import ModelGraph
from hpsearch.layout import EXCHANGES
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end import experts, models
from tests.end_to_end.models import build
from tests.end_to_end.parity import DTYPES, double_throughout, reference
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.sequences import ROWS, compare, compare_stages
from tests.end_to_end.slow import slow_devices

PLANS: dict[str, tuple[int, dict[str, object]]] = {
    "cp-2": (2, {"cp": 2}),
    "cp-4": (4, {"cp": 4}),
    "cp-2 x tp-2": (4, {"cp": 2, "tp": 2}),
    "cp-2 x pp-2": (4, {"cp": 2, "pp": 2}),
    "cp-2 x fsdp-2": (4, {"cp": 2, "dp_shard": 2}),
}
ALWAYS = {("window", "ring", "cp-2"), ("packed", "ulysses", "cp-2")}
"""Part of the matrix that every run takes."""
FURTHER = [
    ("mixed_windows", "ring", "cp-2"),
    ("mixed_windows", "gathered", "cp-4"),
    ("mixed_windows", "ulysses", "cp-2 x pp-2"),
    ("by_products", "gathered", "cp-2"),
    ("by_products", "gathered", "cp-4"),
    ("by_products", "gathered", "cp-2 x tp-2"),
]
LIMITS = {"loss": 1e-6, "norm": 1e-10, "gradient": 1e-10, "parameter": 1e-10}
"""Losses of transformers are computed in fp32 by the models themselves."""


@cache
def graph(family: str) -> ModelGraph:
    case = build(family, DTYPES["fp64"])
    with double_throughout(family, "fp64"):
        return capture(case.model, case.batch, recipe="fp64", rows=2).graph


def plan(family: str, kind: str, name: str) -> Plan:
    devices, fix = PLANS[name]
    return search(graph(family), slow_devices(devices), global_batch=ROWS, fix=fix | {"cp_kind": kind})


def matrix() -> Iterator[Any]:
    cells = [(family, kind, name) for family in ("causal", "window", "packed") for kind in EXCHANGES for name in PLANS]
    for cell in cells + FURTHER:
        yield pytest.param(*cell, marks=[] if cell in ALWAYS else [pytest.mark.exhaustive])


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "fix"),
    [
        ("mixtral", {"cp": 2}),
        ("mixtral", {"cp": 2, "ep": 2, "cp_kind": "ring"}),
        ("mixtral", {"cp": 2, "ep_over": "cp"}),
        ("mixtral_skewed", {"cp": 2, "ep": 2, "ep_over": "cp"}),
        ("gpt_oss_skewed", {"cp": 4, "ep_over": "cp", "cp_kind": "gathered"}),
        ("gpt_oss", {"cp": 2}),
        ("deepseek_v3", {"cp": 2}),
        ("deepseek_v3_skewed", {"cp": 4}),
        ("deepseek_v3_skewed", {"cp": 2, "tp": 2}),
        ("deepseek_v3_skewed", {"cp": 2, "ep": 2, "ep_over": "cp"}),
        ("deepseek_v3", {"cp": 2, "pp": 2, "ep_over": "cp"}),
        ("t5", {"cp": 2, "micro_batches": 1}),
        ("gpt2", {"cp": 2, "cp_kind": "ulysses"}),
    ],
)
def test_other_families(family: str, fix: dict[str, int | str], ranks: RankPool, tmp_path: Path) -> None:
    """Experts, on ranks of cp too, latent attention, sinks beside scores, an encoder with another sequence, learned
    positions. Passed on 2026-12-01."""
    devices = prod(int(fix.get(name, 1)) for name in ("pp", "cp", "ep", "tp"))
    made = search(graph(family), slow_devices(devices), global_batch=models.ROWS, fix=fix)
    reference(family, "fp64", tmp_path / "trace.pt")
    work = f"{experts.compare.__module__}:{experts.compare.__name__}"
    arguments = {"family": family, "recipe": "fp64", "plan": made.content, "path": str(tmp_path / "trace.pt")}
    for result in ranks.run(work, ranks=devices, **arguments):
        for what, limit in LIMITS.items():
            assert result[what] <= limit, f"{what} under {made}"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "name"), list(matrix()))
def test_parity(family: str, kind: str, name: str, ranks: RankPool, tmp_path: Path) -> None:
    made = plan(family, kind, name)
    assert next(axis.exchange for axis in made.mesh.axes if axis.name == "cp") == kind
    reference(family, "fp64", tmp_path / "trace.pt")
    work = compare_stages if "pp" in name else compare
    results = ranks.run(
        f"{work.__module__}:{work.__name__}",
        ranks=PLANS[name][0],
        family=family,
        recipe="fp64",
        plan=made.content,
        path=str(tmp_path / "trace.pt"),
    )
    for result in results:
        print(f"{family} {kind} {name} " + "  ".join(f"{what} {error:.1e}" for what, error in result.items()))
        for what, limit in LIMITS.items():
            assert result[what] <= limit, f"{what} under {made}"
