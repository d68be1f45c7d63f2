"""Thousands of layouts at once are priced as one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate
from hpsearch.estimate.many import estimate_all
from hpsearch.estimate.shape import transformer

LLAMA = ModelShape("Llama", 8192, 64, 8, 128, 128256, transformer(80, 0, 0), ffn=28672)
EXPERTS = ModelShape(
    "Qwen3", 4096, 64, 4, 128, 151936, transformer(92, 0, 128), ffn=12288, experts=128, top_k=8, moe_ffn=1536
)


def layouts(count: int, seed: int, experts: bool) -> list[ParallelLayout]:
    """Random legal ones, over every dimension."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        pick = draw.choice
        pp = pick((1, 2, 4, 8))
        fsdp = pp == 1 and pick((False, True))
        try:
            one = ParallelLayout(
                devices=256, seq_len=4096, micro_batch=pick((1, 2, 4)), global_batch=pick((256, 512, 1024)),
                tp=pick((1, 2, 4, 8)), pp=pp, cp=pick((1, 2)), vpp=pick((1, 2)) if pp > 1 else 1,
                ep=pick((1, 8, 32)) if experts else 1, sp=pick((False, True)), zero=3 if fsdp else pick((0, 1, 2)),
                fsdp=fsdp, recompute=pick(("none", "selective", "full")), overlap_grad_reduce=pick((False, True)),
            )  # fmt: skip
        except LegalityError:
            continue
        found.append(one)
    return found


@pytest.mark.parametrize(("shape", "experts"), [(LLAMA, False), (EXPERTS, True)], ids=["dense", "moe"])
def test_all_at_once_is_one_by_one(shape: ModelShape, experts: bool) -> None:
    cluster = Cluster.load("h100-sxm-ib400", devices=256)
    some = layouts(60, 7, experts)
    found = estimate_all(shape, some, cluster)
    alone = [estimate(shape, layout, cluster) for layout in some]
    np.testing.assert_allclose(found.step_s, [one.step_s for one in alone], rtol=1e-9)
    np.testing.assert_allclose(found.peak_bytes, [one.peak_bytes for one in alone], rtol=1e-12)


def test_order_does_not_matter() -> None:
    cluster = Cluster.load("h100-sxm-ib400", devices=256)
    some = layouts(20, 3, experts=False)
    forth, back = estimate_all(LLAMA, some, cluster), estimate_all(LLAMA, some[::-1], cluster)
    np.testing.assert_array_equal(forth.step_s, back.step_s[::-1])


def test_none_is_none() -> None:
    cluster = Cluster.load("h100-sxm-ib400", devices=256)
    assert len(estimate_all(LLAMA, [], cluster).step_s) == 0


def test_a_field_of_the_blocks_is_not_shared() -> None:
    """Layouts that differ in what a block does must not take each other's blocks."""
    cluster = Cluster.load("h100-sxm-ib400", devices=256)
    base = ParallelLayout(devices=256, seq_len=4096, micro_batch=1, global_batch=256, tp=8)
    changes = [{"flash": False}, {"sp": True}, {"fused": False}, {"recompute": "full"}, {"precision": "fp8"}]
    found = estimate_all(LLAMA, [base, *(replace(base, **change) for change in changes)], cluster)
    assert len(set(found.step_s.tolist())) == len(changes) + 1
