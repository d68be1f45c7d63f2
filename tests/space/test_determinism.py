"""One question has one answer, to the last bit: whatever the hash seed and the number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.shape import StateSpace, hybrid, transformer
from hpsearch.space import Found, Space, best

REPO = Path(__file__).parents[2]
SETTINGS = (("0", "1"), ("1", "2"), ("2", "1"), ("2", "2"))
BASE = ParallelLayout(
    devices=1, seq_len=4096, micro_batch=1, global_batch=32, overlap_grad_reduce=True, fused=False,
)  # fmt: skip


def spaces() -> dict[str, Space]:
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    small = replace(cluster, device=replace(cluster.device, memory_bytes=24 * 10**9))
    experts = ModelShape(
        "experts", 2048, 16, 4, 128, 64000, transformer(5, 1, 8), ffn=8192, experts=8, top_k=2, moe_ffn=4096
    )
    mixed = ModelShape(
        "hybrid", 2048, 16, 4, 128, 64000, hybrid("M-M*-E"), ffn=8192, experts=8, top_k=2, moe_ffn=2048,
        mamba=StateSpace(64, 64, 128, 8),
    )  # fmt: skip
    rows = {"micro_batch": (1, 2)}
    return {
        "experts": Space(experts, small, BASE, rows),
        "hybrid, parts of layers again": Space(mixed, small, BASE, {**rows, "recompute": ("norm+activation",)}),
    }


def text_of(found: Found) -> str:
    """All of it but the seconds it took; sets in order."""
    return json.dumps(asdict(replace(found, seconds=0.0)), default=sorted)


def answers() -> str:
    return "\n".join(text_of(best(space)) for space in spaces().values())


@pytest.fixture(scope="module")
def here() -> str:
    return answers()


@pytest.mark.parametrize(("hash_seed", "threads"), SETTINGS)
def test_every_process_finds_the_same(hash_seed: str, threads: str, here: str) -> None:
    there = {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    code = "from tests.space.test_determinism import answers; print(answers())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=os.environ | there | {"PYTHONPATH": str(REPO)}, timeout=200,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == here + "\n"


def test_again_in_one_process(here: str) -> None:
    assert answers() == here
