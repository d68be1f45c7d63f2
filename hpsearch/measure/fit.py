"""What a profile can be summed up in, what that leaves unexplained, and how well the measurement repeats. Pure.

Prices come from the measured points; the fits here are for people to read and for residuals to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hpsearch.measure.samples import Samples


@dataclass(frozen=True)
class Line:
    """seconds = start_s + nbytes / bytes_per_s, and how far points lie from it."""

    start_s: float
    bytes_per_s: float
    residuals: tuple[float, ...]
    """fitted / measured - 1 of each point."""

    @property
    def median_residual(self) -> float:
        return median(abs(r) for r in self.residuals)

    @property
    def worst_residual(self) -> float:
        return max(abs(r) for r in self.residuals)

    def to_json(self) -> dict[str, float]:
        return {
            "start_us": self.start_s * 1e6,
            "GB_per_s": self.bytes_per_s / 1e9,
            "median_residual": self.median_residual,
            "worst_residual": self.worst_residual,
        }


def fit_line(nbytes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line through the points with the least squares of relative errors; both numbers positive.

    Relative, because points span six decades: absolute errors would fit the largest message alone.
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weighted = np.stack([1 / y, x / y], axis=1)
    (start, slope), *_ = np.linalg.lstsq(weighted, np.ones_like(y), rcond=None)
    if len(x) < 2 or slope <= 0:
        start, slope = 0.0, float(np.mean(y / x))
    if start < 0:  # the least squares through the origin
        start, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    fitted = start + slope * x
    return Line(float(start), 1 / float(slope), tuple(float(v) for v in fitted / y - 1))


@dataclass(frozen=True)
class Repeats:
    """By how much a measurement differs from its repeat: second best pass over best, less 1, of each point.

    Two passes that agree are believed; a point on which they did not was measured a third time.
    """

    by_kind: dict[str, float]
    """Median over the points of a kind."""
    median: float
    worst: tuple[tuple[str, float], ...]
    """The points that repeat worst, with their spread."""


def repeats(samples: Samples) -> Repeats:
    """How well the measurement repeats; all zero for a single pass."""
    spread: dict[str, float] = {}
    for key in dict.fromkeys(name for _, name in sorted(samples.found)):
        best = sorted(sample.best_s for sample in samples.passes(key))
        if len(best) > 1 and key != "overlap":
            spread[key] = best[1] / best[0] - 1
    kinds: dict[str, list[float]] = {}
    for key, value in spread.items():
        kinds.setdefault(key.split()[0], []).append(value)
    worst = sorted(spread.items(), key=lambda item: (-item[1], item[0]))[:5]
    middle = median(spread.values()) if spread else 0.0
    return Repeats({kind: median(values) for kind, values in kinds.items()}, middle, tuple(worst))


def curves_of(best: Mapping[str, float]) -> dict[str, tuple[list[int], list[float]]]:
    """Points that differ only in bytes, by what they share; pairs, whose seconds are of many pairs, left out."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for key, seconds in best.items():
        name, _, size = key.rpartition(" ")
        if size.endswith("B") and size[:-1].isdigit() and not key.startswith("pair "):
            nbytes, values = found.setdefault(name, ([], []))
            nbytes.append(int(size[:-1]))
            values.append(seconds)
    return found


def fits(samples: Samples) -> dict[str, Any]:
    """A line for every curve, and residuals of every point, for `fit.json` and `residuals.json`."""
    lines, residuals = {}, []
    for name, (nbytes, seconds) in curves_of(samples.best()).items():
        line = fit_line(nbytes, seconds)
        lines[name] = line.to_json()
        residuals += [
            {"point": f"{name} {n}B", "measured_s": s, "fitted_s": s * (1 + r), "residual": r}
            for n, s, r in zip(nbytes, seconds, line.residuals, strict=True)
        ]
    return {"lines": lines, "residuals": residuals}
