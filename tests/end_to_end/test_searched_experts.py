"""Pins of expert parallelism at random, for every family of experts, as plans on real ranks against the plain model.

HPSEARCH_SEED=<seed> draws the same again, HPSEARCH_DRAWN=<n> draws n a family. Run by hand.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hpsearch.errors import LegalityError
from hpsearch.plan import Plan
from hpsearch.search import search
from tests.end_to_end import experts
from tests.end_to_end.experts import EXPERTS
from tests.end_to_end.models import ROWS
from tests.end_to_end.parity import reference
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.slow import slow_devices
from tests.end_to_end.test_expert_hops import two_nodes
from tests.end_to_end.test_experts import graph
from tests.end_to_end.test_parity import LIMITS

RECIPE = "fp64"
SEED = int(os.environ.get("HPSEARCH_SEED", random.SystemRandom().randrange(10**6)))
DRAWN = int(os.environ.get("HPSEARCH_DRAWN", "3"))


def pins(draw: random.Random) -> tuple[int, dict[str, object]]:
    """(devices, pins): ep alone or beside another axis or a pipeline, tokens in either form."""
    devices = draw.choice([2, 4, 4])
    found: dict[str, object] = {"ep": draw.choice([2, devices])}
    if found["ep"] != devices:
        found[draw.choice(["tp", "dp_shard", "dp_replicate", "pp"])] = 2
    found |= {"micro_batches": draw.choice([1, 2, 3, 6]), "recompute": draw.choice(["none", "full"])}
    if draw.random() < 0.6:
        found["ep_kind"] = draw.choice(["apart", "together"])
    if "pp" in found:
        found["schedule"] = draw.choice(["gpipe", "1f1b", "zb-h1"])
    return devices, found


def drawn(family: str, draw: random.Random) -> tuple[int, dict[str, object], Plan]:
    """The first pins that are legal."""
    while True:
        devices, found = pins(draw)
        cluster = two_nodes() if devices == 4 else slow_devices(devices)
        try:
            return devices, found, search(graph(family, RECIPE), cluster, global_batch=ROWS, fix=found)
        except LegalityError as error:
            print(f"refused {found}: {error}")


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300 * DRAWN)
@pytest.mark.parametrize("family", [f"{name}{kind}" for name in EXPERTS for kind in ("", "_skewed")])
def test_any_pins_of_experts_run(family: str, ranks: RankPool, tmp_path: Path) -> None:
    print(f"HPSEARCH_SEED={SEED} HPSEARCH_DRAWN={DRAWN} {family}")
    draw, path = random.Random(f"{SEED} {family}"), tmp_path / "trace.pt"
    reference(family, RECIPE, path)
    for _ in range(DRAWN):
        devices, found, plan = drawn(family, draw)
        results = ranks.run(
            f"{experts.__name__}:{experts.compare.__name__}", ranks=devices, family=family, recipe=RECIPE,
            plan=plan.content, path=str(path),
        )  # fmt: skip
        worst = {what: max(result[what] for result in results) for what in LIMITS[RECIPE]}
        assert all(worst[what] <= limit for what, limit in LIMITS[RECIPE].items()), f"{found}: {worst}"
