"""Layouts that a search has not excluded yet, as columns: many millions are enumerated, and most of them soon gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpsearch.space.space import Row, Slot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Places of rows that are all different, and which of those each row is."""
    key = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        values, here = np.unique(column, return_inverse=True)
        key = np.unique(key * len(values) + here, return_inverse=True)[1]
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which


@dataclass(frozen=True)
class Part:
    """Layouts of a slot that are not excluded yet, as columns."""

    slot: Slot
    rows: Ints
    """Outsides."""
    number: Ints
    """Inside in the slot."""
    row: Ints
    bound_s: Floats


@dataclass(frozen=True)
class Candidates:
    """Layouts in order of their first bound."""

    parts: list[Part]
    part: NDArray[np.int32]
    at: NDArray[np.int32]
    """Place in its part."""
    bound_s: Floats

    @staticmethod
    def of(parts: list[Part], best_s: float) -> Candidates:
        some = [np.flatnonzero(part.bound_s < best_s).astype(np.int32) for part in parts]
        which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(one) for one in some])
        at = np.concatenate([np.zeros(0, dtype=np.int32), *some])
        bound = np.concatenate([np.zeros(0), *(part.bound_s[one] for part, one in zip(parts, some, strict=True))])
        order = np.argsort(bound, kind="stable")
        return Candidates(parts, which[order], at[order], bound[order])

    def __len__(self) -> int:
        return len(self.at)

    def least_s(self, i: int) -> float:
        """Bound of the i-th and all behind it."""
        return float(self.bound_s[i]) if i < len(self) else float("inf")

    def some(self, start: int, stop: int) -> Some:
        """Those from the start-th to the stop-th."""
        which, at = self.part[start:stop], self.at[start:stop]
        rows, inside = np.empty((len(at), 7), dtype=np.int64), np.empty(len(at), dtype=np.int64)
        insides = list[tuple[Slot, int]]()
        order = np.argsort(which, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(which[order])) + 1) if len(at) else ():
            part = self.parts[which[here[0]]]
            rows[here] = part.rows[part.row[at[here]]]
            numbers, inverse = np.unique(part.number[at[here]], return_inverse=True)
            inside[here] = inverse + len(insides)
            insides += [(part.slot, number) for number in numbers.tolist()]
        return Some(insides, inside, rows, self.bound_s[start:stop])


@dataclass(frozen=True)
class Some:
    """Layouts, one entry each."""

    insides: list[tuple[Slot, int]]
    """Slots, and number of an inside in each."""
    inside: Ints
    """Which inside."""
    rows: Ints
    """[layouts, 7] outsides."""
    bound_s: Floats

    def of(self, chosen: list[int]) -> Some:
        """Some of them."""
        return Some(self.insides, self.inside[chosen], self.rows[chosen], self.bound_s[chosen])

    def __iter__(self) -> Iterator[tuple[Slot, int, Row]]:
        """(slot, number of the inside in it, outside)."""
        for inside, (pp, vpp, dp, m, zero, shard_ranks, kinds) in zip(
            self.inside.tolist(), self.rows.tolist(), strict=True
        ):
            yield *self.insides[inside], (pp, vpp, dp, m, zero, shard_ranks, kinds)
