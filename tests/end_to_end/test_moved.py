"""A checkpoint of any plan goes on under any other, experts and stages included, as if nothing had happened.

`pytest -m exhaustive` saves under each of six plans and loads under each of six; last run 2026-12-01: losses within
6.5e-8, which is the model's own fp32 sum.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from hpsearch.capture import capture
from hpsearch.graph import ModelGraph
from hpsearch.search import search
from tests.end_to_end import moved
from tests.end_to_end.models import ROWS, build
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices

JOBS = moved.__name__
PLANS: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "dp_shard=4": (4, {"dp_shard": 4}),
    "ep=4": (4, {"ep": 4}),
    "ep=2 x tp=2": (4, {"ep": 2, "tp": 2}),
    "pp=4": (4, {"pp": 4, "micro_batches": 4}),
    "pp=2 x dp_shard=2": (4, {"pp": 2, "dp_shard": 2, "micro_batches": 2, "schedule": "interleaved", "vpp": 2}),
}


@cache
def graph() -> ModelGraph:
    case = build(moved.FAMILY, torch.float64)
    return capture(case.model, case.batch, recipe="fp64", rows=2).graph


@cache
def content(name: str) -> bytes:
    devices, fix = PLANS[name]
    return search(graph(), slow_devices(devices), global_batch=ROWS, fix=fix).content


@pytest.mark.dist
@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_every_other_plan(ranks: RankPool, tmp_path: Path) -> None:
    """Every plan's own next losses are those of the others, and those of each checkpoint under each plan."""
    folders = {name: tmp_path / name.replace(" ", "") for name in PLANS}
    wanted: tuple[float, float] | None = None
    worst = 0.0
    for name, folder in folders.items():
        for found in ranks.run(f"{JOBS}:saved", ranks=PLANS[name][0], plan=content(name), folder=folder):
            wanted = wanted or found
            assert found == pytest.approx(wanted, rel=1e-6), name
    for name in PLANS:
        for saved, folder in folders.items():
            for found in ranks.run(f"{JOBS}:loaded", ranks=PLANS[name][0], plan=content(name), folder=folder):
                assert found == pytest.approx(wanted, rel=1e-6), f"saved under {saved}, loaded under {name}"
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(found, wanted or found, strict=True)))
    print(f"{len(PLANS)} x {len(PLANS)} plans: largest difference of a loss {worst:.1e}")
