"""Errors of predictions: by family, device, kind and scale; ranking and regret in sweeps; memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpsearch.estimate import Estimate
from hpsearch.validate.rows import Case, Row

SWEEP_LAYOUTS = 6
"""Fewest distinct layouts that make a sweep."""
TORCH_COUNTS = ("allocated",)


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
    def memory_error(self) -> float | None:
        measured = self.case.measured_peak_bytes
        return None if measured is None or not self.finished else self.estimate.memory.tensor_bytes / measured - 1

    @property
    def fits(self) -> bool:
        return self.estimate.peak_bytes <= self.case.cluster.device.memory_bytes


def scored(row: Row, case: Case) -> bool:
    """Whether the row counts: a completed run of tier A or B with a full layout."""
    return row["tier"] in ("A", "B") and case.full


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Median and 90th percentile of the absolute errors, and the median of the signed ones."""
    found = np.array(list(errors))
    if not len(found):
        return {"rows": 0}
    return {
        "rows": len(found),
        "median": float(np.median(np.abs(found))),
        "p90": float(np.quantile(np.abs(found), 0.9)),
        "bias": float(np.median(found)),
    }


def by(key: Callable[[Predicted], str], found: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """`summary` of the step errors of each group."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.error is not None and scored(one.row, one.case):
            groups[key(one)].append(one.error)
    return {name: summary(groups[name]) for name in sorted(groups)}


def scale(one: Predicted) -> str:
    devices = one.case.layout.devices
    return "1 node" if devices <= 8 else "9-64" if devices <= 64 else "65-256" if devices <= 256 else "over 256"


def sweeps(found: Sequence[Predicted]) -> dict[str, list[Predicted]]:
    """Runs that differ only in layout: same table, model, device, count, batch, precision and sequence."""
    groups: defaultdict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        if one.error is not None and scored(one.row, one.case):
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
    """Does it fit: on families that report both completed and out-of-memory runs."""
    both = {o.row["family"] for o in found if not o.finished} & {o.row["family"] for o in found if o.finished}
    ran = [o for o in found if o.finished and o.row["family"] in both]
    failed = [o for o in found if not o.finished]
    if not ran or not failed:
        return {"completed": len(ran), "out_of_memory": len(failed)}
    right_ran, right_failed = sum(o.fits for o in ran) / len(ran), sum(not o.fits for o in failed) / len(failed)
    return {
        "completed": len(ran),
        "out_of_memory": len(failed),
        "balanced_accuracy": (right_ran + right_failed) / 2,
        "false_fits": 1 - right_failed,
        "false_out_of_memory": 1 - right_ran,
    }


def scores(found: Sequence[Predicted], rows: int) -> dict[str, Any]:
    """The figures of the report, in the form that `--json` prints."""
    counted = [o.error for o in found if o.error is not None and scored(o.row, o.case)]
    peaks = [o.memory_error for o in found if o.memory_error is not None]
    swept = sweep_scores(found)
    step = summary(counted)
    predicted = int(step.pop("rows"))
    empty = not swept
    return {
        "step_time": {"rows": rows, "predicted": predicted, **step},
        "memory": {
            **fit_scores(found),
            **{f"peak_{key}": value for key, value in summary(peaks).items()},
            "peak_lowest": min(peaks) if peaks else None,
        },
        "sweeps": {
            "count": len(swept),
            "spearman_median": None if empty else float(np.median([s["spearman"] for s in swept.values()])),
            "regret_median": None if empty else float(np.median([s["regret"] for s in swept.values()])),
            "regret_worst": None if empty else max(s["regret"] for s in swept.values()),
        },
        "families": by(lambda one: str(one.row["family"]), found),
    }
