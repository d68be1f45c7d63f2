"""Pieces against torch.chunk, and the mesh against DTensor's own idea of it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hpsearch.layout import Layout, Mesh
from hpsearch.run.batch import RowSampler
from hpsearch.run.ranks import data_index
from hpsearch.run.shards import piece

MESHES = [Mesh.of(dp_shard=4), Mesh.of(tp=3), Mesh.of(dp_shard=2, tp=2), Mesh.of(dp_replicate=2, dp_shard=3, tp=2)]
SHAPES = [(6,), (5, 10), (8, 3), (1,), (49155 // 64, 4)]


def chunked(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    for axis, placement in layout:
        parts = tensor.chunk(mesh.size(axis), placement.dim)
        place = mesh.coordinate(rank)[axis]
        empty = tensor.narrow(placement.dim, 0, 0)
        tensor = parts[place] if place < len(parts) else empty
    return tensor


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_piece_is_what_nested_chunks_leave(mesh: Mesh, shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    words = [["R", *(f"S{d}" for d in range(len(shape)))] for _ in mesh.names]
    for choice in itertools.product(*words):
        layout = Layout.parse(" ".join(f"{a}:{w}" for a, w in zip(mesh.names, choice, strict=True) if w != "R") or "R")
        for rank in range(mesh.num_ranks):
            found = whole[piece(shape, layout, mesh, mesh.coordinate(rank))]
            expected = chunked(whole, layout, mesh, rank)
            assert torch.equal(found, expected) or found.numel() == expected.numel() == 0


def test_pieces_lose_and_double_nothing() -> None:
    mesh, shape = Mesh.of(dp_shard=5), (49155, 2)
    layout = Layout.parse("dp_shard:S0")
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    parts = [whole[piece(shape, layout, mesh, mesh.coordinate(rank))] for rank in range(5)]
    assert all(len(part) == 9831 for part in parts)
    assert torch.equal(torch.cat(parts), whole)


def test_ranks_of_one_tp_group_share_their_rows() -> None:
    mesh = Mesh.of(dp_replicate=2, dp_shard=2, tp=2)
    index = [data_index(mesh, rank) for rank in range(8)]
    assert index == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_the_sampler_deals_every_row_once_and_the_same_global_batches_to_any_number_of_ranks(seed: int | None) -> None:
    length, rows = 50, 12

    def dealt(pieces: int) -> list[set[int]]:
        samplers = [RowSampler(length, rows, index, pieces, seed) for index in range(pieces)]
        drawn = [list(sampler) for sampler in samplers]
        assert all(len(d) == len(s) for d, s in zip(drawn, samplers, strict=True))
        local = rows // pieces
        return [{i for d in drawn for i in d[b * local : (b + 1) * local]} for b in range(length // rows)]

    assert dealt(1) == dealt(2) == dealt(3) == dealt(4)
    assert all(len(batch) == rows for batch in dealt(4))
    assert len(set().union(*dealt(4))) == length // rows * rows


def test_an_epoch_changes_the_order_and_nothing_else_does() -> None:
    sampler = RowSampler(40, 8, 1, 2, 0)
    first = list(sampler)
    random.seed(5)
    torch.manual_seed(5)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
