"""States, traffic and work of optimizers, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.estimate import ModelShape, ParallelLayout, estimate, memory
from hpsearch.estimate.optimizer import ITERATIONS, matrices, moment_bytes, orthogonal_s, traffic_bytes
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks

LLAMA = ModelShape("Llama", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
LAYOUT = ParallelLayout(devices=64, seq_len=4096, micro_batch=1, global_batch=128, tp=2, zero=0)


def test_adamw_reads_and_writes_44_bytes() -> None:
    """Norm and scale 4 + 4, two moments 2·(4 + 4), master 4 + 4, gradient 4 + 4, weight 2 + 2."""
    assert traffic_bytes(LAYOUT) == 8 + 16 + 8 + 8 + 4


@pytest.mark.parametrize(
    ("optimizer", "element", "kept"), [("adamw", 4, 8), ("adamw", 2, 4), ("adamw", 1, 2), ("muon", 4, 4), ("sgd", 4, 0)]
)
def test_states(optimizer: str, element: int, kept: int) -> None:
    layout = replace(LAYOUT, optimizer=optimizer, moment_element_bytes=element)
    assert moment_bytes(layout) == kept
    states, plain = dict(memory(LLAMA, layout).parts)["optimizer"], dict(memory(LLAMA, LAYOUT).parts)["optimizer"]
    assert states / plain == pytest.approx((4 + kept) / 12)


def test_newton_schulz_by_hand() -> None:
    """X [n, k], n ≤ k: XXᵀ 2n²k, A² 2n³, times X 2n²k; five times; one owner among 32 data ranks."""
    cluster = Cluster.load("h100-sxm-ib400", devices=64)
    layout = replace(LAYOUT, optimizer="muon", tp=1, global_batch=128)
    sides = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)] + [(4096, 14336)] * 3
    assert sorted(tuple(sorted(pair)) for block in ("attention", "mlp") for pair in matrices(LLAMA, layout, block)) == (
        sorted(sides)
    )
    flops = 32 * ITERATIONS * sum(4 * n * n * k + 2 * n**3 for n, k in sides)
    rate = cluster.device.peak_flops_per_s("bfloat16") * cluster.device.matmul_efficiency
    assert orthogonal_s(LLAMA, layout, cluster, chunks(LLAMA, layout)) == pytest.approx(flops / 64 / rate)


def test_muon_takes_longer_and_less_memory() -> None:
    cluster = Cluster.load("h100-sxm-ib400", devices=64)
    adam, muon = (estimate(LLAMA, replace(LAYOUT, optimizer=name), cluster) for name in ("adamw", "muon"))
    assert muon.step_s > adam.step_s
    assert muon.peak_bytes < adam.peak_bytes
