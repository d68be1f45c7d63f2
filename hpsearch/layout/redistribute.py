"""From one placement to another along one mesh axis: which collective, with how many bytes, and no price.

Axes are handled one at a time, in split order, because each axis has a group of its own.
`nbytes` of a collective, the one convention used in costs, plans and byte counts:

    all_gather      bytes of the gathered (large) tensor on one rank
    reduce_scatter  bytes of the input (large) tensor on one rank
    all_reduce      bytes of the tensor on one rank
    all_to_all      bytes of the local tensor on one rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpsearch.layout.placement import Layout, Placement


@dataclass(frozen=True)
class Collective:
    kind: str
    axis: str
    nbytes: int


def kind_between(source: Placement, target: Placement) -> str | None:
    """The collective that turns `source` into `target` on one axis, `None` when the change is local and free.

    R→S is a slice and R→P keeps the tensor on the first rank and zeros elsewhere: both local.
    S→P has no use and is refused (KeyError).
    """
    if source == target or source.is_replicate:
        return None
    return {
        ("S", "R"): "all_gather",
        ("S", "S"): "all_to_all",
        ("P", "R"): "all_reduce",
        ("P", "S"): "reduce_scatter",
    }[source.kind, target.kind]


def is_reachable(source: Placement, target: Placement) -> bool:
    return not (source.is_shard and target.is_partial)


@dataclass(frozen=True)
class Step:
    """One axis changes from `source` to `target`; `kind` is its collective, or `None` for a local slice or mask."""

    axis: str
    source: Placement
    target: Placement
    kind: str | None


def path(source: Layout, target: Layout, order: tuple[str, ...]) -> tuple[Step, ...]:
    """The axes that change, in the order that is right for nested cuts and cheap in bytes; `order` is the split order.

    Gathers run innermost cut first; exchanges next; cuts (slices and reduce-scatters) outermost first; all-reduces
    last, when the tensor is smallest: HSDP reduces over dp_replicate only the piece that dp_shard left.
    """
    steps = [
        Step(axis, source[axis], target[axis], kind_between(source[axis], target[axis]))
        for axis in order
        if source[axis] != target[axis]
    ]
    gathers = [s for s in reversed(steps) if s.kind == "all_gather"]
    exchanges = [s for s in steps if s.kind == "all_to_all"]
    cuts = [s for s in steps if s.kind in (None, "reduce_scatter")]
    sums = [s for s in steps if s.kind == "all_reduce"]
    return tuple(gathers + exchanges + cuts + sums)


def redistribute(
    shape: tuple[int, ...], item_bytes: int, source: Layout, target: Layout, sizes: Mapping[str, int]
) -> tuple[Collective, ...]:
    """The collectives from `source` to `target` for a tensor of global `shape`, in the order they are issued.

    `sizes` maps every axis of the mesh to its size, in split order. Uneven cuts count their padded size: that is what
    goes over the wire.
    """
    order = tuple(sizes)
    found: list[Collective] = []
    now = source
    for step in path(source, target, order):
        after = now.with_(step.axis, step.target, order)
        if step.kind is not None:
            large = after if step.kind == "all_gather" else now
            count = _padded_elements(shape, large, now if large is after else after, sizes)
            found.append(Collective(step.kind, step.axis, count * item_bytes))
        now = after
    return tuple(found)


def _padded_elements(shape: tuple[int, ...], large: Layout, small: Layout, sizes: Mapping[str, int]) -> int:
    """Elements of the large side of a collective when its small side is padded to equal pieces."""
    pieces, elements = 1, 1
    for axis, placement in small:
        if placement.is_shard and not large[axis].is_shard:
            pieces *= sizes[axis]
    for size in (small if pieces > 1 else large).local_shape(shape, sizes):
        elements *= size
    return elements * pieces
