"""`fit`: the few efficiencies of a device generation from measured steps.

Robust least squares of the log step time towards a stated prior, by Gauss-Newton. Numbers are fitted as logs, each in
units of how far it may reasonably stand from its prior; a number about which the rows say less than the prior keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpsearch.cluster.efficiency import NAMES, SPREAD, Efficiency
from hpsearch.errors import PlanError
from hpsearch.estimate.estimate import Priced
from hpsearch.estimate.pipeline import Path
from hpsearch.estimate.price import Floats

FREE = ("linear", "linear_low", "routed", "core", "moved", "links")
"""What is fitted for a device generation."""
NOISE = 0.08
"""Of one row's log step time: runs that differ in nothing we know differ by as much. Larger errors count linearly."""
ROWS_ALIKE = 3.0
"""How many rows one independent observation is worth: rows of one table share what is wrong with them."""
CARRIED = 0.9
"""A number is fitted if its standard error is below this share of its prior's spread."""
ROUNDS = 5


@dataclass(frozen=True)
class Number:
    """One fitted number."""

    name: str
    value: float
    prior: float
    error: float
    """Standard error of the log."""


@dataclass(frozen=True)
class Fit:
    efficiency: Efficiency
    numbers: tuple[Number, ...]
    kept: tuple[str, ...]
    """Asked for, but the rows do not carry them: at their priors."""
    residuals: tuple[float, ...]
    """Log of predicted over measured, row by row."""


def fit(
    priced: Sequence[Priced],
    measured_s: Sequence[float],
    *,
    prior: Efficiency | None = None,
    free: Sequence[str] = FREE,
    weights: Sequence[float] | None = None,
) -> Fit:
    """The `free` numbers under which `priced` layouts take `measured_s` seconds a step; all others as in `prior`.

    `weights`: of each row's squared error, 1 if not given. PlanError: an unknown number, fewer rows than numbers, a
    measured time that is none.
    """
    start = prior or Efficiency()
    _check(priced, measured_s, free)
    rows = _Rows(priced, np.log(np.asarray(measured_s, dtype=np.float64)), _weights(weights, len(priced)))
    asked = tuple(free)
    paths = rows.paths(start)
    error = _standard_errors(rows.slopes(start, asked, paths) * _spread(asked), rows.weight)
    names = tuple(name for name, size in zip(asked, error, strict=True) if size < CARRIED)
    found = moved(start, names, _minimum(rows, start, names, paths))
    paths = rows.paths(found)
    error = _standard_errors(rows.slopes(found, names, paths) * _spread(names), rows.weight) * _spread(names)
    numbers = tuple(
        Number(name, getattr(found, name), getattr(start, name), float(size))
        for name, size in zip(names, error, strict=True)
    )
    kept = tuple(name for name in asked if name not in names)
    return Fit(found, numbers, kept, tuple(rows.errors(found, paths).tolist()))


def moved(start: Efficiency, names: Sequence[str], x: Floats) -> Efficiency:
    """`start` with each named number moved by x of its spreads."""
    changes = {n: getattr(start, n) * float(np.exp(SPREAD[n] * v)) for n, v in zip(names, x, strict=True)}
    return replace(start, **changes)


@dataclass(frozen=True)
class _Rows:
    priced: Sequence[Priced]
    log_s: Floats
    weight: Floats

    def paths(self, efficiency: Efficiency) -> list[Path]:
        return [one.path(efficiency) for one in self.priced]

    def errors(self, efficiency: Efficiency, paths: Sequence[Path]) -> Floats:
        return np.log(self._seconds(efficiency, paths)) - self.log_s

    def slopes(self, efficiency: Efficiency, names: Sequence[str], paths: Sequence[Path]) -> Floats:
        """d log step / d log number, [rows, numbers], along these chains of the pipelines."""
        base = self._seconds(efficiency, paths)
        found = np.zeros((len(self.priced), len(names)))
        for j, name in enumerate(names):
            more = replace(efficiency, **{name: getattr(efficiency, name) * (1 + NUDGE)})
            found[:, j] = (self._seconds(more, paths) / base - 1) / NUDGE
        return found

    def _seconds(self, efficiency: Efficiency, paths: Sequence[Path]) -> Floats:
        return np.array([one.step(efficiency, path)[0] for one, path in zip(self.priced, paths, strict=True)])


NUDGE = 1e-3


def _weights(weights: Sequence[float] | None, rows: int) -> Floats:
    return (np.ones(rows) if weights is None else np.asarray(weights, dtype=np.float64)) / ROWS_ALIKE


def _check(priced: Sequence[Priced], measured_s: Sequence[float], free: Sequence[str]) -> None:
    if unknown := sorted(set(free) - set(NAMES)):
        raise PlanError("fit", f"expected numbers among {', '.join(NAMES)}, but found {', '.join(unknown)}", "")
    if len(priced) != len(measured_s) or len(priced) < len(free):
        raise PlanError(
            "fit", f"expected a measured step for each layout and at least as many as the {len(free)} free numbers, "
            f"but found {len(measured_s)} steps of {len(priced)} layouts", "Measure more, or free fewer numbers.",
        )  # fmt: skip
    wrong = [seconds for seconds in measured_s if not 0 < seconds < float("inf")]
    if wrong:
        raise PlanError("fit", f"expected step times above 0 s, but found {wrong[0]} s", "Leave that row out.")


def _spread(names: Sequence[str]) -> Floats:
    return np.array([SPREAD[name] for name in names])


def _standard_errors(slope: Floats, weight: Floats) -> Floats:
    """Of each number in units of its spread, beside a prior of 1: the diagonal of the inverse information."""
    information = (slope * (weight / NOISE**2)[:, None]).T @ slope + np.eye(slope.shape[1])
    return np.asarray(np.sqrt(np.diag(np.linalg.inv(information))))


def _loss(error: Floats, weight: Floats, x: Floats) -> float:
    """Pseudo-Huber in units of the noise, and the prior."""
    return float((weight * 2 * (np.sqrt(1 + (error / NOISE) ** 2) - 1)).sum() + x @ x)


def _minimum(rows: _Rows, start: Efficiency, names: Sequence[str], paths: Sequence[Path]) -> Floats:
    """Where the loss is least, in spreads from the prior: Gauss-Newton with halved steps.

    The chains of the pipelines are those of the prior first, then once more those of what was found with them.
    """
    x = np.zeros(len(names))
    for turn in range(2 if names else 0):
        found = moved(start, names, x)
        if turn:
            paths = rows.paths(found)
        error = rows.errors(found, paths)
        loss = _loss(error, rows.weight, x)
        for _ in range(ROUNDS):
            slope = rows.slopes(moved(start, names, x), names, paths) * _spread(names)
            robust = rows.weight / (NOISE**2 * np.sqrt(1 + (error / NOISE) ** 2))
            curvature = (slope * robust[:, None]).T @ slope + np.eye(len(names))
            step = -np.linalg.solve(curvature, slope.T @ (robust * error) + x)
            for _ in range(HALVINGS):
                tried = rows.errors(moved(start, names, x + step), paths)
                new = _loss(tried, rows.weight, x + step)
                if new < loss:
                    break
                step = step / 2
            if new >= loss:
                break
            x, error, gained, loss = x + step, tried, loss - new, new
            if gained < ENOUGH * loss:
                break
    return x


HALVINGS = 4
ENOUGH = 1e-3
"""Share of the loss that another round must be worth."""
