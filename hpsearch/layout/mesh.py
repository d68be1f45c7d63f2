"""`Mesh`: named axes over ranks, each with its size, its stride in ranks, and the link tier it runs on.

Rank of a coordinate = Σ coordinate[axis] · stride. Axes stand in *split order*: where two axes cut the same tensor
dim, the one that stands first cuts first. Split order is `dp_replicate, cp, tp, ep, dp_shard`, although `tp` is
innermost in rank order: a parameter cut by tp for use and by dp_shard for storage is then a plain nested Shard in
DTensor's left-to-right order, and gathering over dp_shard gives back exactly the piece that tp uses. `cp` stands in
front of `tp`, so that tp may cut and gather a sequence inside the piece that cp left; `ep` in front of `dp_shard` as
`tp` is.

Each axis has a *role*. On axes of the roles `batch` and `sequence` tensors follow the batch or its sequences; on one of
the role `experts` they follow the batch, and experts are spread over it. What a value is there is found once
(strategy/), only `free` axes are chosen op by op.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

SPLIT_ORDER = ("dp_replicate", "cp", "tp", "ep", "dp_shard")
"""Axis roles in the order in which they cut a tensor dim."""
RANK_ORDER = ("dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Axis roles from the outermost (slowest links) to the innermost (neighbouring ranks)."""
ROLES = {"dp_replicate": "batch", "dp_shard": "batch", "ep": "experts", "cp": "sequence", "tp": "free"}
"""What each axis is for."""
EXCHANGES = ("gathered", "ring", "ulysses")
"""Ways of attention over a cut sequence: keys and values of all ranks gathered, passed around in blocks, or heads
exchanged for positions."""
HEAD_TAIL = "head-tail"
DATA_AXES = tuple(name for name, role in ROLES.items() if role in ("batch", "experts"))
"""Axes that split the batch."""


@dataclass(frozen=True)
class MeshAxis:
    name: str
    size: int
    stride: int
    tier: str = ""
    """Name of the outermost link tier that a group of this axis spans."""
    exchange: str = ""
    """Of cp: how attention sees keys of other ranks: gathered, ring or ulysses."""
    order: str = ""
    """Of cp: which pieces of a sequence a rank has; `head-tail`: r and 2n-1-r of 2n, so that causal work is equal."""
    hops: tuple[int, ...] = ()
    """Of ep: sizes of the hops in which one copy of a token goes to each domain, outermost first; (): each copy on its
    own, one to every expert. Of cp, where experts are spread over it too: the same, in front of those of ep."""


@dataclass(frozen=True)
class Mesh:
    axes: tuple[MeshAxis, ...]
    """In split order; axes of size 1 are left out."""

    @staticmethod
    def of(**degrees: int) -> Mesh:
        """The mesh with these degrees, `tp` on neighbouring ranks. Degrees of 1 vanish."""
        stride, found = 1, {}
        for name in reversed(RANK_ORDER):
            size = degrees.get(name, 1)
            if size > 1:
                found[name] = MeshAxis(name, size, stride)
            stride *= size
        return Mesh(tuple(found[name] for name in SPLIT_ORDER if name in found))

    @property
    def num_ranks(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @property
    def data_axes(self) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in self.axes if axis.name in DATA_AXES)

    @property
    def expert_axes(self) -> tuple[MeshAxis, ...]:
        """Axes that experts are spread over besides tp, in split order."""
        return tuple(a for a in self.axes if ROLES[a.name] == "experts" or (ROLES[a.name] == "sequence" and a.hops))

    @property
    def num_data_ranks(self) -> int:
        """How many different pieces the batch is cut into."""
        return prod(axis.size for axis in self.data_axes)

    @property
    def followed(self) -> dict[str, int]:
        """Role → how many pieces its axes cut together; roles that are not free, and have an axis here."""
        found: dict[str, int] = {}
        for axis in self.axes:
            role = ROLES[axis.name]
            if role != "free":
                found[role] = found.get(role, 1) * axis.size
        return found

    @property
    def head_tail(self) -> bool:
        """Whether ranks of cp have a piece from the front and one from the back of each sequence."""
        return any(axis.order == HEAD_TAIL for axis in self.axes)

    @property
    def hops(self) -> tuple[MeshAxis, ...]:
        """Hops as axes of their own, `ep/0`, `ep/1`, …: hop after hop, their groups lead to every rank of one of ep."""
        found = []
        for axis in self.axes:
            stride = axis.stride * axis.size
            for i, size in enumerate(axis.hops):
                stride //= size
                found.append(MeshAxis(f"{axis.name}/{i}", size, stride))
        return tuple(found)

    def size(self, name: str) -> int:
        return self.sizes.get(name, 1)

    def axis(self, name: str) -> MeshAxis:
        return next(axis for axis in (*self.axes, *self.hops) if axis.name == name)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        return {axis.name: rank // axis.stride % axis.size for axis in self.axes}

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` forms a group with along axis `name`, in axis order."""
        axis = self.axis(name)
        first = rank - rank // axis.stride % axis.size * axis.stride
        return tuple(first + i * axis.stride for i in range(axis.size))

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "1 device"
