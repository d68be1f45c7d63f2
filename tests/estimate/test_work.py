"""FLOPs, bytes and collectives of a layer against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.estimate import one_block
from hpsearch.estimate.price import LINEAR, TP
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks
from hpsearch.estimate.work import attention, mlp

LLAMA = ModelShape("8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
ONE = ParallelLayout(devices=1, seq_len=4096, micro_batch=1, global_batch=1)


def flops(layout: ParallelLayout) -> float:
    """Forward FLOPs of one layer on one device."""
    parts = (attention(LLAMA, layout), mlp(LLAMA, layout))
    return sum(2 * m * n * k * b for work in parts for m, n, k, b in work.linears) + sum(w.core_flops for w in parts)


def test_flops_of_a_layer() -> None:
    """2 FLOPs for each weight and token: 4096·(4096·2 + 2·1024) + 3·4096·14336 weights; core 4·s²·h, half of it."""
    weights = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    assert flops(ONE) == 2 * 4096 * weights + 4 * 4096 * 4096 * 4096 / 2


@pytest.mark.parametrize("degrees", [{"tp": 8}, {"cp": 8}, {"tp": 4, "cp": 2}])
def test_parallel_ranks_share_the_flops(degrees: dict[str, int]) -> None:
    assert flops(replace(ONE, devices=8, **degrees)) * 8 == pytest.approx(flops(ONE))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_of_an_overlapped_ring_one_piece_shows(tp: int) -> None:
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    layout = replace(ONE, devices=tp, tp=tp, sp=True)
    (_, alone), (_, beside) = (
        one_block("mlp", LLAMA, replace(layout, overlap_tp=overlaps), cluster) for overlaps in (False, True)
    )
    assert beside.forward[TP] * tp == pytest.approx(alone.forward[TP])
    assert beside.backward[TP] * tp == pytest.approx(alone.backward[TP])
    assert alone.forward[TP] > 0


def test_overlap_hides_no_more_than_the_products_take() -> None:
    cluster = Cluster.load("a100-sxm-selene", devices=8)
    tiers = tuple(replace(one, bytes_per_s=one.bytes_per_s / 20, curves=()) for one in cluster.tiers)
    slow = Cluster(cluster.name, cluster.devices, cluster.device, tiers)
    layout = replace(ONE, devices=8, tp=8, sp=True)
    (_, alone), (_, beside) = (
        one_block("mlp", LLAMA, replace(layout, overlap_tp=over), slow) for over in (False, True)
    )
    for before, after in ((alone.forward, beside.forward), (alone.backward, beside.backward)):
        assert before[TP] > before[LINEAR] * 8 / 7, "what the rule is about"
        assert after[TP] == pytest.approx(before[TP] - before[LINEAR], rel=1e-12)


def test_overlap_needs_ranks_that_reach_each_others_memory() -> None:
    for name, tp, hides in (("a100-sxm-selene", 16, False), ("gb200-nvl72", 16, True), ("atlas-800-a3", 16, True)):
        cluster, layout = Cluster.load(name, devices=64), replace(ONE, devices=16, tp=tp, sp=True)
        (_, alone), (_, beside) = (
            one_block("mlp", LLAMA, replace(layout, overlap_tp=over), cluster) for over in (False, True)
        )
        assert (beside.forward[TP] < alone.forward[TP]) == hides, name


def test_a_written_score_matrix_costs_the_full_square() -> None:
    """Causal kernels compute half of it; a batched product computes all: 4·s²·h."""
    assert attention(LLAMA, replace(ONE, flash=False)).core_flops == 2 * attention(LLAMA, ONE).core_flops


@pytest.mark.parametrize(("tp", "rows", "fused"), [(8, 1, True), (16, 1, False), (16, 2, True), (16, 3, False)])
def test_the_fused_softmax_takes_score_matrices_in_fours(tp: int, rows: int, fused: bool) -> None:
    """32 heads: 4, 2, 4 and 6 matrices on a rank. Where it cannot, eight kernels for three, 30 bytes an element for 8,
    and a result in fp32 beside the one in 16 bit."""
    written = replace(ONE, devices=tp, tp=tp, micro_batch=rows, global_batch=rows, flash=False)
    found, ops = (attention(LLAMA, replace(written, fused_softmax=asked)) for asked in (True, False))
    scores = rows * 4096 * 4096 * 32 / tp
    assert found.fused_softmax is fused
    assert not ops.fused_softmax
    assert found.core_bytes == (8 if fused else 30) * scores
    assert ops.kernels_forward - found.kernels_forward == (5 if fused else 0)
    assert ops.kernels_backward - found.kernels_backward == (6 if fused else 0)
    assert found.saved_parts["attention"] == (2 if fused else 6) * scores


def test_sequence_sharding_moves_as_many_bytes() -> None:
    """All-reduce = all-gather + reduce-scatter; the backward gathers its input once more."""
    plain = mlp(LLAMA, replace(ONE, devices=8, tp=8))
    split = mlp(LLAMA, replace(ONE, devices=8, tp=8, sp=True))
    size = 2.0 * 4096 * 4096
    assert plain.tp_forward == [("all_reduce", size)]
    assert plain.tp_backward == [("all_reduce", size)]
    assert split.tp_forward == [("all_gather", size), ("reduce_scatter", size)]
    assert len(split.tp_backward) == 3


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 16, 32])
def test_stages_hold_every_layer_once(pp: int) -> None:
    layout = replace(ONE, devices=pp, pp=pp, global_batch=pp)
    cut = chunks(LLAMA, layout)
    assert sum(chunk.layers for chunk in cut) == 32
    assert sum((chunk.blocks for chunk in cut), start=type(cut[0].blocks)()) == LLAMA.counts
    assert [chunk.embedding for chunk in cut] == [True] + [False] * (pp - 1)
    assert [chunk.heads for chunk in cut] == [0] * (pp - 1) + [1]


def test_uneven_stages_give_the_last_fewer_layers() -> None:
    shape = replace(LLAMA, pattern=transformer(61, 0, 0), mtp_layers=1)
    cut = chunks(shape, replace(ONE, devices=16, pp=16, global_batch=16))
    assert [chunk.layers for chunk in cut] == [4] * 15 + [1], "as DeepSeek-V3 is laid out; not one of five"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 3}, "tp·pp·cp to divide 8"),
        ({"global_batch": 9}, "whole micro-batches"),
        ({"ep": 3}, "ep·etp to divide"),
        ({"recompute": "some"}, "expected recompute in"),
    ],
)
def test_illegal_layouts_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(LegalityError, match=words):
        replace(ParallelLayout(devices=8, seq_len=1, micro_batch=1, global_batch=8), **change)
