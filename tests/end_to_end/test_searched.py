"""What a search may choose, runs: layouts drawn from its space, as plans on real ranks, against the plain model.

Every run draws others and prints its seed; HPSEARCH_SEED=<seed> draws them again, HPSEARCH_DRAWN=<n> draws n a family.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.end_to_end.models import ROWS
from tests.end_to_end.ranks import RankPool
from tests.end_to_end.searched import drawn, planned
from tests.end_to_end.test_pipeline import check, graph

FAMILIES = {"llama_deep": 12, "gpt2_deep": 12}
"""Family → tokens of a row of its batch."""
SEED = int(os.environ.get("HPSEARCH_SEED", random.SystemRandom().randrange(10**6)))
DRAWN = int(os.environ.get("HPSEARCH_DRAWN", "3"))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300 * DRAWN)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_layout_of_the_space_runs(
    family: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f" HPSEARCH_SEED={SEED} HPSEARCH_DRAWN={DRAWN} {family}", flush=True)
    draw, references = random.Random(f"{SEED} {family}"), dict[str, Path]()
    sizes = [draw.choice([2, 3, 4]) for _ in range(DRAWN)]
    for devices in sorted(set(sizes)):
        layouts = [drawn(graph(family), devices, ROWS, FAMILIES[family], draw) for _ in range(sizes.count(devices))]
        plans = [planned(graph(family), layout) for layout in layouts]
        check(ranks, family, plans, references, [], tmp_path_factory)
