"""Every change of layout, run on every rank, gives the pieces that cutting the global tensor gives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hpsearch.errors import LoweringError
from hpsearch.layout import PARTIAL, REPLICATE, Layout, Mesh, Placement, shard
from hpsearch.lower import local_ops
from hpsearch.lower.redistribution import redistribute_value
from hpsearch.lower.statement import LocalValue
from tests.lower.reference import cut
from tests.lower.simulate import Collectives, on_ranks


def pieces(tensor: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """What each rank holds. On a partial axis the pieces differ by rank and sum to the tensor."""
    found = []
    for rank in range(mesh.num_ranks):
        piece = tensor
        for axis, placement in layout:
            if placement.is_partial:
                generator = torch.Generator().manual_seed(mesh.axis(axis).stride)
                parts = [torch.randn(tensor.shape, generator=generator).double() for _ in range(mesh.size(axis) - 1)]
                addends = [*parts, piece - sum(parts)]  # nested partial axes split the addend of the outer one
                piece = addends[mesh.coordinate(rank)[axis]]
        found.append(cut(piece, Layout(tuple((a, p) for a, p in layout if p.is_shard)), mesh, rank))
    return found


def move(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh) -> list[Tensor]:
    value = LocalValue("x", tuple(tensor.shape), "float64", source)
    statements = redistribute_value(value, target, mesh, phase="forward", what="x", name="y")
    text = "\n".join(s.text for s in statements) or "y = x"
    held = pieces(tensor, source, mesh)

    def work(rank: int, collectives: Collectives) -> Tensor:
        coordinate = mesh.coordinate(rank)
        names: dict[str, Any] = {
            "c10d": collectives,
            "coordinate": coordinate,
            "groups": {axis: mesh.group(axis, rank) for axis in mesh.names},
            "extent": partial(local_ops.extent, coordinate),
            "x": held[rank],
            **{n: getattr(local_ops, n) for n in ("cut", "join", "mask", "pad", "split", "trim")},
        }
        exec(text, names)
        made: Tensor = names["y"]
        stated = sum(s.sent.nbytes for s in statements if s.sent)
        sent = sum(nbytes for _, _, nbytes in collectives.log)
        assert sent == stated if rank == 0 else sent <= stated, text
        return made

    return on_ranks(mesh.num_ranks, work)


def check(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh) -> None:
    made = move(tensor, source, target, mesh)
    partial_axes = [axis for axis, p in target if p.is_partial]
    if not partial_axes:
        wanted = pieces(tensor, target, mesh)
        for a, b in zip(made, wanted, strict=True):
            assert a.shape == b.shape, f"{source} -> {target}"
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        return
    cuts = Layout(tuple((a, p) for a, p in target if p.is_shard))
    for rank in range(mesh.num_ranks):
        there = mesh.coordinate(rank)
        addends = [
            made[r]
            for r in range(mesh.num_ranks)
            if all(mesh.coordinate(r)[a] == there[a] for a in mesh.names if a not in partial_axes)
        ]
        torch.testing.assert_close(sum(addends), cut(tensor, cuts, mesh, rank), rtol=1e-12, atol=1e-12)


PLACEMENTS = [REPLICATE, PARTIAL, shard(0), shard(1), shard(2)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("source", "target"), list(product(PLACEMENTS, PLACEMENTS)))
def test_one_axis_even(source: Placement, target: Placement, size: int) -> None:
    mesh = Mesh.of(tp=size)
    tensor = torch.randn(12, 24, 12).double()
    if source.is_shard and target.is_partial:
        with pytest.raises(LoweringError, match="addends"):
            move(tensor, Layout.of({"tp": source}), Layout.of({"tp": target}), mesh)
        return
    check(tensor, Layout.of({"tp": source}), Layout.of({"tp": target}), mesh)


@pytest.mark.parametrize("length", [1, 2, 5, 7])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_pieces(dim: int, size: int, length: int) -> None:
    """Stored parameters: gathered, cut and reduced in torch.chunk's pieces, some of them empty."""
    mesh = Mesh.of(dp_shard=size)
    shape = [4, 4]
    shape[dim] = length
    cut_ = Layout.of({"dp_shard": shard(dim)})
    for source, target in [(cut_, Layout()), (Layout(), cut_), (Layout.of({"dp_shard": PARTIAL}), cut_)]:
        check(torch.randn(*shape).double(), source, target, mesh)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 10, 11])
def test_uneven_pieces_of_two_axes_on_one_dim(length: int) -> None:
    mesh = Mesh.of(tp=2, dp_shard=3)
    tensor = torch.randn(length, 3).double()
    nested = Layout((("tp", shard(0)), ("dp_shard", shard(0))))
    both = Layout((("tp", PARTIAL), ("dp_shard", PARTIAL)))
    outer = Layout((("tp", shard(0)),))
    for source, target in [(nested, Layout()), (nested, outer), (Layout(), nested), (both, nested), (outer, nested)]:
        check(tensor, source, target, mesh)


def test_two_axes_every_pair_of_layouts() -> None:
    """All layouts of a matrix on a 2 x 2 mesh: right, or refused where an outer cut would change under an inner one."""
    mesh = Mesh.of(tp=2, dp_shard=2)
    tensor = torch.randn(4, 8).double()
    options = [Layout.of({"tp": a, "dp_shard": b}) for a, b in product(PLACEMENTS[:4], PLACEMENTS[:4])]
    outcomes: Counter[str] = Counter()
    for source, target in product(options, options):
        try:
            check(tensor, source, target, mesh)
            outcomes["right"] += 1
        except LoweringError as error:
            outcomes[
                "addends" if "addends" in str(error) else "nested" if "inside the pieces" in str(error) else "?"
            ] += 1
    # 60 pairs ask an axis to go from a cut to addends
    assert outcomes == {"right": 176, "addends": 60, "nested": 20}
