"""The ring of context-parallel ranks, counted step by step on every rank, and held to the closed form."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from hpsearch.estimate import ModelShape, ParallelLayout
from hpsearch.estimate.ring import ring_bytes, ring_kernels
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import attention

QUERIES, PAIRS = 4096 * 4096.0, 4096 * 2048.0
SHAPE = ModelShape("1 layer", 4096, 32, 8, 128, 32000, transformer(1, 0, 0), ffn=14336)


def counted(ranks: int, rank: int) -> tuple[float, float]:
    """(forward, backward) bytes of one rank, whose pieces of the sequence are `rank` and 2·ranks - 1 - rank."""
    both = (rank, 2 * ranks - 1 - rank)
    forward, backward = 4 * PAIRS + 6 * QUERIES, 4 * (QUERIES + PAIRS)  # one buffer and the first sum; first gradients
    for step in range(1, ranks):
        source = (rank - step) % ranks
        seen = [(q, k) for q in both for k in (source, 2 * ranks - 1 - source) if k < q]
        queries = QUERIES / 2 * len({q for q, _ in seen})
        pairs = PAIRS / 2 * len({k for _, k in seen})
        assert len(seen) == 2, "two pieces of scores a step: no rank waits for another"
        forward += 6 * queries + sum(4 * part for part, whole in ((queries, QUERIES), (pairs, PAIRS)) if part < whole)
        copied = (3 * queries if queries < QUERIES else 0.0) + (pairs if pairs < PAIRS else 0.0)
        backward += 6 * (queries + pairs) + 4 * copied
    return forward, backward


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_are_those_of_the_steps(ranks: int) -> None:
    each = [counted(ranks, rank) for rank in range(ranks)]
    found = ring_bytes(ranks, QUERIES, PAIRS)
    assert found == pytest.approx([mean(pair[i] for pair in each) for i in (0, 1)])


def test_a_ring_is_dearer_than_exchanged_heads_by_its_steps() -> None:
    """Nothing but the ring's own kernels differs, and each step adds as many."""
    layout = ParallelLayout(devices=4, seq_len=8192, micro_batch=1, global_batch=1, cp=4)
    ring, heads = attention(SHAPE, layout), attention(SHAPE, replace(layout, cp_kind="ulysses"))
    moved = ring_bytes(4, 2048 * 4096, 2048 * 2048)
    assert ring.moved_forward - heads.moved_forward == pytest.approx(moved[0])
    assert ring.moved_backward - heads.moved_backward == pytest.approx(moved[1])
    assert (ring.kernels_forward - heads.kernels_forward, ring.kernels_backward - heads.kernels_backward) == (17, 29)
    assert ring_kernels(5)[0] - ring_kernels(4)[0] == 5


def test_one_rank_has_no_ring() -> None:
    layout = ParallelLayout(devices=1, seq_len=8192, micro_batch=1, global_batch=1)
    assert attention(SHAPE, layout) == attention(SHAPE, replace(layout, cp_kind="ulysses"))
