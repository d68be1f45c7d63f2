"""Spaces with fewer layouts: those of one micro-batch, those of other meshes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from hpsearch.estimate import ParallelLayout
from hpsearch.space import Space
from hpsearch.space.rules import Rules
from hpsearch.space.space import Inside, Ints

Mesh = tuple[int, int, int, int, int]
"""tp, cp, pp, dp, ep."""


def mesh_of(layout: ParallelLayout) -> Mesh:
    return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep


@dataclass(frozen=True)
class _Narrowed(Space):
    @classmethod
    def of(cls, space: Space, **more: Any) -> Self:
        """`space` without some of its layouts."""
        told: dict[str, Any] = {one.name: getattr(space, one.name) for one in fields(Space)}
        return cls(**told, **more)


@dataclass(frozen=True)
class OnePass(_Narrowed):
    """Layouts whose step is one micro-batch: nothing accumulates."""

    def outsides(self, inside: Inside, rules: Rules) -> Ints:
        rows = super().outsides(inside, rules)
        return np.asarray(rows[rows[:, 3] == 1])


@dataclass(frozen=True)
class Apart(_Narrowed):
    """Layouts of other meshes than these."""

    without: frozenset[Mesh] = field(default_factory=frozenset)

    def outsides(self, inside: Inside, rules: Rules) -> Ints:
        rows = super().outsides(inside, rules)
        keep = [(inside.tp, inside.cp, pp, dp, inside.ep) not in self.without for pp, dp in rows[:, [0, 2]].tolist()]
        return np.asarray(rows[np.array(keep, dtype=np.bool_)])
