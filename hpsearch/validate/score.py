"""Errors of predictions: by family, device, kind and scale; ranking and regret in sweeps; memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate import Estimate, rank_memory
from hpsearch.estimate.band import STATED
from hpsearch.validate.rows import Case, Row, scored

SWEEP_LAYOUTS = 6
"""Fewest distinct layouts that make a sweep."""


@dataclass(frozen=True)
class Predicted:
    case: Case
    estimate: Estimate

    @property
    def row(self) -> Row:
        return self.case.row

    @property
    def finished(self) -> bool:
        return str(self.row["result"]["status"]) == "ok"

    @property
    def error(self) -> float | None:
        """Of the step, relative to the measured one; positive: predicted slower."""
        measured = self.case.measured_s
        return None if measured is None or not self.finished else self.estimate.step_s / measured - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the band of the predicted one."""
        measured = self.case.measured_s
        if measured is None or not self.finished:
            return None
        return self.estimate.low_s <= measured <= self.estimate.high_s

    @property
    def memory_error(self) -> float | None:
        """Of the peak, by the measure the row names: what torch allocated unless it says reserved, or all of the device
        as nvidia-smi shows it; on the fullest rank unless it says rank 0."""
        measured = self.case.measured_peak_bytes
        if measured is None or not self.finished:
            return None
        text, memory = str(self.row.get("notes")).lower(), self.estimate.memory
        if "rank-0" in text or "rank 0" in text:
            memory = rank_memory(self.case.shape, self.case.layout, 0)
        if "nvidia-smi" in text:
            return memory.peak_bytes / measured - 1
        return (memory.reserved_bytes if "reserved" in text else memory.tensor_bytes) / measured - 1

    @property
    def fits(self) -> bool:
        return self.estimate.peak_bytes <= self.case.cluster.device.memory_bytes


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Median and 90th percentile of the absolute errors, and the mean of the signed ones."""
    found = np.array(list(errors))
    if not len(found):
        return {"rows": 0}
    return {
        "rows": len(found),
        "median": float(np.median(np.abs(found))),
        "p90": float(np.quantile(np.abs(found), 0.9)),
        "bias": float(np.mean(found)),
    }


def by(key: Callable[[Predicted], str], found: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """`summary` of the step errors of each group."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.error is not None and scored(one.row):
            groups[key(one)].append(one.error)
    return {name: summary(groups[name]) for name in sorted(groups)}


def band_by(key: Callable[[Predicted], str], found: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """Of each group: runs with a step time that counts, the share inside the band, and its median half width."""
    groups: defaultdict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        if one.inside is not None and scored(one.row):
            groups[key(one)].append(one)
    return {
        name: {
            "rows": len(group),
            "inside": sum(bool(o.inside) for o in group) / len(group),
            "half_width": float(np.median([o.estimate.high_s / o.estimate.step_s - 1 for o in group])),
        }
        for name, group in sorted(groups.items())
    }


def scale(one: Predicted) -> str:
    devices = one.case.layout.devices
    return "1 node" if devices <= 8 else "9-64" if devices <= 64 else "65-256" if devices <= 256 else "over 256"


def sweeps(found: Sequence[Predicted]) -> dict[str, list[Predicted]]:
    """Runs that differ only in layout: same table, model, device, count, batch, precision and sequence."""
    groups: defaultdict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        if one.error is not None and scored(one.row):
            groups[_sweep_name(one)].append(one)
    return {name: group for name, group in sorted(groups.items()) if _layouts(group) >= SWEEP_LAYOUTS}


def _sweep_name(one: Predicted) -> str:
    row, layout = one.row, one.case.layout
    source = row["source"]
    what = (row["family"], source.get("table"), source.get("published"), one.case.shape.name)
    run = (row["hardware"]["device"], layout.devices, layout.global_batch, layout.precision, layout.seq_len)
    return " | ".join(str(word) for word in (*what, *run))


def _layouts(group: Sequence[Predicted]) -> int:
    return len({one.case.layout for one in group})


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0, equal values sharing their mean."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    return np.asarray((first + (count - 1) / 2)[inverse])


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    a, b = ranks(np.array(left)), ranks(np.array(right))
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / norm) if norm else 0.0


def regret(group: Sequence[Predicted]) -> float:
    """Measured step of the layout predicted to be fastest, over the measured best, less one."""
    chosen = min(group, key=lambda one: one.estimate.step_s)
    best = min(one.case.measured_s or 0.0 for one in group)
    return (chosen.case.measured_s or 0.0) / best - 1


def sweep_scores(found: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "rows": len(group),
            "spearman": spearman([o.estimate.step_s for o in group], [o.case.measured_s or 0.0 for o in group]),
            "regret": regret(group),
        }
        for name, group in sweeps(found).items()
    }


def fit_scores(found: Sequence[Predicted]) -> dict[str, float]:
    """Does it fit: on tables that report both completed and out-of-memory runs; and how many completed runs of all
    tables were said not to fit."""
    completed = [o for o in found if o.finished]
    both = {_table(o) for o in found if not o.finished} & {_table(o) for o in completed}
    ran = [o for o in completed if _table(o) in both]
    failed = [o for o in found if not o.finished and _table(o) in both]
    refused = sum(not o.fits for o in completed) / len(completed) if completed else 0.0
    if not both:
        return {"completed": 0, "out_of_memory": 0, "completed_refused": refused}
    right_ran, right_failed = sum(o.fits for o in ran) / len(ran), sum(not o.fits for o in failed) / len(failed)
    return {
        "completed": len(ran),
        "out_of_memory": len(failed),
        "balanced_accuracy": (right_ran + right_failed) / 2,
        "false_fits": 1 - right_failed,
        "false_out_of_memory": 1 - right_ran,
        "completed_refused": refused,
    }


def memory_by(key: Callable[[Predicted], str], found: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """Of each group: completed runs, those said not to fit, runs out of memory, those said to fit, and measured peaks
    with their errors."""
    groups: defaultdict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return {name: _memory_counts(group) for name, group in sorted(groups.items())}


def _memory_counts(group: Sequence[Predicted]) -> dict[str, float]:
    peaks = summary(o.memory_error for o in group if o.memory_error is not None)
    return {
        "completed": sum(o.finished for o in group),
        "refused": sum(o.finished and not o.fits for o in group),
        "out_of_memory": sum(not o.finished for o in group),
        "false_fits": sum(not o.finished and o.fits for o in group),
        "peaks": peaks["rows"],
        "peak_median": peaks.get("median", 0.0),
        "peak_lowest": min((o.memory_error for o in group if o.memory_error is not None), default=0.0),
    }


def _table(one: Predicted) -> tuple[str, str]:
    return str(one.row["family"]), str(one.row["source"].get("table"))


def scores(found: Sequence[Predicted], rows: Iterable[Row]) -> dict[str, Any]:
    """The figures of the report, in the form that `--json` prints. `rows`: all rows, predicted or not."""
    counted = [o.error for o in found if o.error is not None and scored(o.row)]
    peaks = [o.memory_error for o in found if o.memory_error is not None]
    swept = list(sweep_scores(found).values())
    step = summary(counted)
    peak = summary(peaks)
    return {
        "step_time": {
            "rows": sum(scored(row) for row in rows),
            "predicted": step.pop("rows"),
            **{name: step.get(name) for name in ("median", "p90", "bias")},
        },
        "memory": {
            **fit_scores(found),
            "peak_rows": peak["rows"],
            **{f"peak_{name}": peak.get(name) for name in ("median", "p90", "bias")},
            "peak_lowest": min(peaks, default=None),
        },
        "sweeps": {
            "spearman_median": _median(s["spearman"] for s in swept),
            "regret_median": _median(s["regret"] for s in swept),
            "regret_worst": max((s["regret"] for s in swept), default=None),
        },
        "band": {"stated": STATED, **band_by(lambda _: "all", found).get("all", {"rows": 0, "inside": None})},
        "families": by(lambda one: str(one.row["family"]), found),
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.median(found)) if found else None
