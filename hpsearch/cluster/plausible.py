"""One number or table of a cluster file: its unit, its sign, its plausible range."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import isfinite

from hpsearch.cluster.schema import Number, Numbers
from hpsearch.cluster.units import UNITS, Complaint, check_range

Path = tuple[str | int, ...]
FRACTION = (0.01, 1.0)
"""What an efficiency may be."""


def number_wrong(
    path: Path, number: Number, dimension: str, allowed: tuple[float, float], what: str
) -> Iterator[Complaint]:
    """The unit is of the right dimension; the value is finite, positive and plausible."""
    wrong = unit_wrong(path, number.unit, dimension)
    if wrong:
        yield wrong
        return
    yield from finite_wrong(path, number.value, allowed[0] > 0)
    if isfinite(number.value) and (number.value > 0 or allowed[0] == 0):
        complaint = check_range(path, number.value, number.unit, dimension, allowed, what)
        if complaint:
            yield complaint


def numbers_wrong(
    path: Path, numbers: Numbers, count: int, dimension: str, allowed: tuple[float, float], what: str
) -> Iterator[Complaint]:
    """As many values as the table has points, each plausible; the first that is not is told."""
    if len(numbers.values) != count:
        yield Complaint(path, f"expected {count} values, one a point, but found {len(numbers.values)}", "Complete it.")
        return
    for value in numbers.values:
        one = Number(value=value, unit=numbers.unit, kind=numbers.kind, source=numbers.source)
        wrong = list(number_wrong(path, one, dimension, allowed, what))
        if wrong:
            yield wrong[0]
            return


def unit_wrong(path: Path, unit: str, dimension: str) -> Complaint | None:
    if unit in UNITS[dimension]:
        return None
    known = ", ".join(UNITS[dimension])
    other = next((name for name, units in UNITS.items() if unit in units), "")
    found = f"{unit!r}, a unit of {other}" if other else repr(unit)
    return Complaint((*path, "unit"), f"expected a unit of {dimension} ({known}), but found {found}", "Write the unit.")


def finite_wrong(path: Path, value: float, positive: bool) -> Iterator[Complaint]:
    if not isfinite(value):
        yield Complaint(path, f"expected a finite number, but found {value}", "Write the number that was measured.")
    elif value < 0 or (positive and value == 0):
        yield Complaint(path, f"expected a positive number, but found {value:g}", "Write the number that was measured.")


def not_growing(path: Path, values: tuple[int, ...]) -> Iterator[Complaint]:
    if not values:
        yield Complaint(path, "expected at least one point, but found none", "Remove the table or fill it.")
    for before, after in pairwise(values):
        if after <= before:
            yield Complaint(path, f"expected growing values, but {after} follows {before}", "Sort the table.")
            return
