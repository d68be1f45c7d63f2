"""A full grid of measured steps on one node: `python -m hpsearch.validate grid.csv --grid`.

The file is that of arXiv 2312.12391 (MIT licence): GPT models with a GELU MLP of 4h and a vocabulary of 51,200, fp16,
full recompute, 1F1B, attention with a written score matrix, Megatron's loss in separate steps; A100-80GB with NVLink.
Each width is left out, a few steps of the others are the calibration, and the width is predicted.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.errors import PlanError
from hpsearch.estimate import ModelShape, ParallelLayout, Priced, price
from hpsearch.estimate.fit import fit
from hpsearch.estimate.shape import transformer

CLUSTER, VOCAB = "a100-sxm-selene", 51200
COLUMNS = ("devices", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp")
FREE = ("linear", "moved", "links", "kernel_s")
"""Small models wait for the host, so its time per kernel is one of them."""
STEP_S = 5e-3
"""Once a step: a benchmark reads no data and logs nothing; the gradient norm and the optimizer's issue are left."""
LAYOUTS = 3
"""Fewest layouts among which a best one is worth choosing."""


@dataclass(frozen=True)
class Step:
    """One measured step of the grid, priced."""

    numbers: Mapping[str, int]
    priced: Priced
    seconds: float


def read_grid(path: Path) -> list[Step]:
    """The steps of the file. PlanError: no such file, or a column is missing."""
    if not path.is_file():
        raise PlanError(str(path), "expected a CSV file of measured steps, but found none", "")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in (*COLUMNS, "step_time_s") if not rows or name not in rows[0]]
    if missing:
        raise PlanError(str(path), f"expected the columns of the grid, but {', '.join(missing)} is missing", "")
    clusters = {n: Cluster.load(CLUSTER, devices=n) for n in sorted({int(row["devices"]) for row in rows})}
    found = []
    for row in rows:
        numbers = {name: int(row[name]) for name in COLUMNS}
        priced = price(_shape(numbers), _layout(numbers), clusters[numbers["devices"]])
        found.append(Step(numbers, priced, float(row["step_time_s"])))
    return found


def _shape(n: Mapping[str, int]) -> ModelShape:
    return ModelShape(
        "GPT", n["hidden"], n["heads"], n["heads"], n["hidden"] // n["heads"], VOCAB, transformer(n["layers"], 0, 0),
        ffn=4 * n["hidden"], gated=False, tied=True, positions=n["seq_len"], bias=True,
    )  # fmt: skip


def _layout(n: Mapping[str, int]) -> ParallelLayout:
    return ParallelLayout(
        devices=n["devices"], seq_len=n["seq_len"], micro_batch=n["micro_batch"], global_batch=n["global_batch"],
        tp=n["tp"], pp=n["pp"], zero=0, precision="fp16", recompute="full", flash=False, fused_loss=False,
        dropout=True, grad_bytes=2, overlap_grad_reduce=True,
    )  # fmt: skip


def calibration_points(steps: Sequence[Step]) -> list[Step]:
    """One step for each tp degree and micro-batch: 16 of a full grid of four each. Which of those that are alike
    otherwise is a walk through them, so that depths, stages and batches differ."""
    groups: defaultdict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.numbers["tp"], step.numbers["micro_batch"]].append(step)
    found = []
    for i, key in enumerate(sorted(groups)):
        alike = sorted(groups[key], key=lambda s: [s.numbers[x] for x in ("pp", "layers", "global_batch", "dp")])
        found.append(alike[7 * i % len(alike)])
    return found


def predicted_s(steps: Sequence[Step]) -> list[float]:
    """Of every step, from calibration steps of other widths alone."""
    prior, numbers = replace(efficiency_of("A100"), step_s=STEP_S), dict[int, Efficiency]()
    for width in sorted({step.numbers["hidden"] for step in steps}):
        points = calibration_points([step for step in steps if step.numbers["hidden"] != width])
        fitted = fit([one.priced for one in points], [one.seconds for one in points], prior=prior, free=FREE)
        numbers[width] = fitted.efficiency
    return [step.priced.step(numbers[step.numbers["hidden"]])[0] for step in steps]


def kendall(left: Sequence[float], right: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other, over all pairs (tau-a)."""
    a, b = np.asarray(left), np.asarray(right)
    upper = np.triu_indices(len(a), 1)
    signs = np.sign(a[:, None] - a[None])[upper] * np.sign(b[:, None] - b[None])[upper]
    return float(signs.mean())


def grid_scores(steps: Sequence[Step], predicted: Sequence[float]) -> dict[str, float]:
    """Mean relative error, rank correlation, and mean regret of the layout predicted to be fastest among those of one
    model, batch and device count."""
    measured = [step.seconds for step in steps]
    groups: defaultdict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for step, seconds in zip(steps, predicted, strict=True):
        same = tuple(step.numbers[x] for x in ("hidden", "heads", "layers", "seq_len", "global_batch", "devices"))
        groups[same].append((seconds, step.seconds))
    regrets = [min(g)[1] / min(m for _, m in g) - 1 for g in groups.values() if len(g) >= LAYOUTS]
    errors = np.asarray(predicted) / np.asarray(measured) - 1
    return {
        "steps": len(steps),
        "mean": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
        "kendall": kendall(predicted, measured),
        "choices": len(regrets),
        "regret": float(np.mean(regrets)),
    }


def grid_report(steps: Sequence[Step]) -> str:
    """The figures with each width left out, and as the A100 generation's own numbers predict the grid."""
    lines = [f"{'':<44}{'steps':>6}{'mean error':>12}{'bias':>8}{'kendall':>9}{'regret':>8}"]
    plain = [step.priced.step(efficiency_of("A100"))[0] for step in steps]
    points = len(calibration_points(steps))
    for name, seconds in (("not calibrated", plain), (f"each width left out, {points} points", predicted_s(steps))):
        s = grid_scores(steps, seconds)
        lines.append(
            f"  {name:<42}{s['steps']:>6.0f}{s['mean']:>12.1%}{s['bias']:>+8.1%}{s['kendall']:>9.3f}{s['regret']:>8.1%}"
        )
    return "\n".join(lines)
