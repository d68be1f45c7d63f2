"""`Replicate`, `Shard(dim)` and `Partial` on one mesh axis, and a `Layout`: one placement for each axis.

Text is the form in plan files and goldens: `R`, `S0`, `P`; a layout is `tp:S1 dp_shard:S0`, axes with `R` left out,
and `R` when every axis replicates. `Placement.parse(str(p)) == p`, and the same for layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from hpsearch.errors import PlanError


@dataclass(frozen=True, order=True)
class Placement:
    """What one rank of a mesh axis holds of a tensor.

    kind `R`: all of it. `S`: the `dim`-th tensor dim cut in equal consecutive chunks. `P`: an addend; the tensor
    is the sum over the axis (the sum of `torch.distributed.tensor.Partial()`).
    """

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.kind == "S" else self.kind

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_replicate(self) -> bool:
        return self.kind == "R"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    @staticmethod
    @cache
    def parse(text: str) -> Placement:
        """The placement that prints as `text`."""
        if text == "R":
            return REPLICATE
        if text == "P":
            return PARTIAL
        if text[:1] == "S" and text[1:].isdecimal() and text.isascii():
            return Placement("S", int(text[1:]))
        raise PlanError(f"placement {text!r}", "expected R, P or S<dim>", "Write for example S0.")


REPLICATE = Placement("R")
PARTIAL = Placement("P")


@cache
def shard(dim: int) -> Placement:
    """The placement that cuts tensor dim `dim` (non-negative)."""
    return Placement("S", dim)


@dataclass(frozen=True)
class Layout:
    """One placement for each mesh axis, in the mesh's split order; axes that are not named replicate."""

    items: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        kept = tuple((axis, p) for axis, p in self.items if not p.is_replicate)
        object.__setattr__(self, "items", kept)

    @staticmethod
    def of(placements: Mapping[str, Placement]) -> Layout:
        return Layout(tuple(placements.items()))

    def __getitem__(self, axis: str) -> Placement:
        return dict(self.items).get(axis, REPLICATE)

    def __iter__(self) -> Iterator[tuple[str, Placement]]:
        return iter(self.items)

    def with_(self, axis: str, placement: Placement, order: tuple[str, ...]) -> Layout:
        """This layout with one axis changed; `order` is the mesh's split order."""
        found = dict(self.items) | {axis: placement}
        return Layout(tuple((a, found[a]) for a in order if a in found))

    def __str__(self) -> str:
        return " ".join(f"{axis}:{p}" for axis, p in self.items) or "R"

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that prints as `text`."""
        if text.strip() == "R":
            return Layout()
        pairs: list[tuple[str, Placement]] = []
        for word in text.split():
            axis, colon, placement = word.partition(":")
            if not colon:
                raise PlanError(
                    f"layout {text!r}", f"expected axis:placement, but got {word!r}", "Write for example tp:S0."
                )
            if axis in dict(pairs):
                raise PlanError(f"layout {text!r}", f"expected each axis once, but got {axis} twice", "Keep one.")
            pairs.append((axis, Placement.parse(placement)))
        return Layout(tuple(pairs))

    def local_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The largest shape a rank holds: each cut rounds up (torch.chunk's rule)."""
        local = list(shape)
        for axis, p in self.items:
            if p.is_shard:
                local[p.dim] = -(-local[p.dim] // sizes[axis])
        return tuple(local)
