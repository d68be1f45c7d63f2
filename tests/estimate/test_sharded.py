"""Gathers of fully sharded parameters, worked out from the collectives they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.estimate import blocks, fsdp_s
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks

SMALL = ModelShape("3 small layers", 1024, 16, 16, 64, 32000, transformer(3, 0, 0), ffn=4096)
RANKS = 256


def gathered_s(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> tuple[float, float]:
    works, _ = blocks(shape, layout, cluster)
    first, *_ = chunks(shape, layout)
    return fsdp_s(shape, layout, cluster, first, works)


def test_a_layer_is_gathered_in_one_call() -> None:
    """Attention and MLP of a layer go together: two calls of half the bytes would wait for two rings of 256 ranks."""
    cluster = Cluster.load("h100-sxm-roce400", devices=RANKS)
    layout = ParallelLayout(devices=RANKS, seq_len=2048, micro_batch=1, global_batch=RANKS, zero=3, fsdp=True)
    layer = SMALL.rank_params("attention", 1) + SMALL.rank_params("mlp", 1)
    table = 32000 * 1024 * 2  # embedding and output projection stand on the one stage, gathered with the embedding
    calls = [(3, layer), (1, SMALL.embedding_params)]
    assert SMALL.embedding_params * 2 == table
    gather, reduce = gathered_s(SMALL, layout, cluster)
    assert gather == pytest.approx(sum(n * cluster.collective("all_gather", 2 * p, RANKS, 1).seconds for n, p in calls))
    grads = [(n, layout.grad_bytes * p) for n, p in calls]
    assert reduce == pytest.approx(sum(n * cluster.collective("reduce_scatter", b, RANKS, 1).seconds for n, b in grads))


def test_extra_prediction_layers_are_gathered_too() -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=RANKS)
    layout = ParallelLayout(devices=RANKS, seq_len=2048, micro_batch=1, global_batch=RANKS, zero=3, fsdp=True)
    plain, _ = gathered_s(SMALL, layout, cluster)
    more, _ = gathered_s(replace(SMALL, mtp_layers=1), layout, cluster)
    layer = SMALL.rank_params("attention", 1) + SMALL.rank_params("mlp", 1)
    assert more - plain == pytest.approx(cluster.collective("all_gather", 2 * layer, RANKS, 1).seconds)
