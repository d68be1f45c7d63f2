"""From one layout to another: which collectives along which mesh axes, with how many bytes, and no price.

A collective runs along one axis, because each axis has a group of its own; over which axes in which order is planned
for all of them together, see `steps_between`.
`nbytes` of a collective, the one convention used in costs, plans and byte counts:

    all_gather      bytes of the gathered (large) tensor on one rank
    reduce_scatter  bytes of the input (large) tensor on one rank
    all_reduce      bytes of the tensor on one rank
    all_to_all      bytes of the local tensor on one rank
    shift           bytes that one rank sends to the next (attention in a ring)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpsearch.layout.mesh import RANK_ORDER, ROLES
from hpsearch.layout.placement import REPLICATE, Layout, Placement, shard

PIECE_BYTES = 2**19
"""Addends over several axes are summed as one where this many bytes are left of each scattered piece: 4 MiB over 8
ranks. From there on it is the cheaper way across slow links of every shipped cluster; at a quarter of it one call more
is up to 8 % dearer on three of them."""


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


def blocking_axis(now: Layout, step: Step, order: tuple[str, ...]) -> str | None:
    """The axis that makes a step impossible: one behind it in split order that cuts the dim whose cut the step starts
    or ends. Rows, and pieces inside each row (data axes and one along sequences), do not meet."""
    dims = {p.dim for p in (step.source, step.target) if p.is_shard}
    for inner in order[order.index(step.axis) + 1 :]:
        roles = {ROLES.get(step.axis), ROLES.get(inner)}
        apart = "sequence" in roles and bool(roles & {"batch", "experts"})
        if now[inner].is_shard and now[inner].dim in dims and not apart:
            return inner
    return None


def is_blocked(
    shape: tuple[int, ...], item_bytes: int, source: Layout, target: Layout, sizes: Mapping[str, int]
) -> bool:
    """Whether no order of collectives along single axes leads from `source` to `target`."""
    now, order = source, tuple(sizes)
    for step in steps_between(shape, item_bytes, source, target, sizes):
        if blocking_axis(now, step, order):
            return True
        now = now.with_(step.axis, step.target, order)
    return False


def steps_between(
    shape: tuple[int, ...], item_bytes: int, source: Layout, target: Layout, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """The steps of `path`, with sums over several axes planned as one.

    [P, P] -> [R, R] one axis at a time sends the whole tensor over the slow axis once for each of the R ranks of the
    fast one. Scattered over the fast axis first (P -> S), summed over the slow one, and gathered again (S -> R), a
    piece each: once in all. So are sums that end cut over the slow axis. The tensor is scattered along its first dim
    that nothing cuts and the axis divides; without one, or where pieces get smaller than PIECE_BYTES, axis by axis.
    """
    order = tuple(sizes)
    steps = path(source, target, order)
    added = sorted((s.axis for s in steps if s.source.is_partial), key=lambda axis: _rank(axis, order))
    whole = item_bytes
    for size in source.local_shape(shape, sizes):
        whole *= size
    taken = {p.dim for _, p in (*source, *target) if p.is_shard}
    scattered: list[tuple[str, Placement]] = []
    for axis in reversed(added[1:]):
        free = (d for d, size in enumerate(shape) if d not in taken and size % sizes[axis] == 0)
        dim = next(free, None) if target[axis] == REPLICATE else None
        if dim is not None and whole // sizes[axis] >= PIECE_BYTES:
            whole //= sizes[axis]
            taken.add(dim)
            scattered.append((axis, shard(dim)))
    moved = {axis for axis, _ in scattered}
    first = [s for s in steps if s.kind in ("all_gather", "all_to_all")]
    rest = [s for s in steps if s not in first and s.axis not in moved]
    down = [Step(axis, source[axis], piece, "reduce_scatter") for axis, piece in scattered]
    up = [Step(axis, piece, REPLICATE, "all_gather") for axis, piece in reversed(scattered)]
    return (*first, *down, *rest, *up)


def _rank(axis: str, order: tuple[str, ...]) -> int:
    """Places from the outermost axis of the ranks; axes of other names lie in the order they stand in."""
    return RANK_ORDER.index(axis) if axis in RANK_ORDER else order.index(axis)


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
    for step in steps_between(shape, item_bytes, source, target, sizes):
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
