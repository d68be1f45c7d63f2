"""Prices of collectives against published times: tables with every second size left out, and calls between nodes.

    python -m tests.benchmarks.bench_collectives

The first table predicts, for each of the shipped measured curves, every second size from the others. The others hold
what is composed from tables of one node and the data of links to what was published between nodes, by the algorithm
that was measured where that is known. Writes results/collectives.md.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np

from hpsearch.cluster import LOCAL, Cluster, Curve, shipped
from tests.benchmarks.machine import described
from tests.cluster.figures import Figure, all_reduces, dispatches

RESULT = Path(__file__).parent / "results" / "collectives.md"


def left_out(curve: Curve) -> np.ndarray:
    """|price ÷ measurement - 1| of every second size, from a curve of the others."""
    coarse = dataclasses.replace(curve, nbytes=curve.nbytes[::2], seconds=curve.seconds[::2])
    return np.abs(coarse.at(np.array(curve.nbytes[1::2], dtype=float)) / np.array(curve.seconds[1::2]) - 1)


def measured_curves() -> dict[str, list[Curve]]:
    """Raw curves of one node by device, each device once."""
    found: dict[str, list[Curve]] = {}
    for name in sorted(set(shipped()) - {LOCAL}):
        cluster = Cluster.load(name, devices=8)
        curves = [c for tier in cluster.tiers for c in tier.curves if c.basis == "measured" and c.size <= 8]
        if curves:
            found.setdefault(cluster.device.name, curves)
    return found


def of_curves() -> list[str]:
    lines = ["| device | collective | ranks | median | 90th centile |", "|---|---|---|---|---|"]
    everything: list[np.ndarray] = []
    for device, curves in measured_curves().items():
        for curve in curves:
            errors = left_out(curve)
            everything.append(errors)
            lines.append(f"| {device} | {curve.kind} | {curve.size} | {middle_and_90th(errors)} |")
    together = np.concatenate(everything)
    lines.append(f"| all {len(everything)} | {len(together)} sizes | | {middle_and_90th(together)} |")
    return lines


def middle_and_90th(errors: np.ndarray) -> str:
    return f"{np.median(errors):.1%} | {np.percentile(errors, 90):.1%}"


def of_figures(figures: list[Figure]) -> list[str]:
    """Each figure, then a line for each group."""
    lines = ["| what | of | published | price | error | way |", "|---|---|---|---|---|---|"]
    groups: dict[str, list[float]] = defaultdict(list)
    for f in figures:
        groups[f.what].append(f.error)
        seconds = " | ".join(f"{s * 1e6:,.0f} us" for s in (f.measured_s, f.priced_s))
        lines.append(f"| {f.what} | {f.detail} | {seconds} | {f.error:+.0%} | {f.how} |")
    lines += ["", "| what | figures | within 25 % | median error | worst |", "|---|---|---|---|---|"]
    groups["all"] = [f.error for f in figures]
    for what, errors in groups.items():
        sizes = np.abs(errors)
        worst = max(errors, key=abs)
        lines.append(
            f"| {what} | {len(errors)} | {int((sizes <= 0.25).sum())} | {np.median(sizes):.0%} | {worst:+.0%} |"
        )
    return lines


def main() -> None:
    parts = [
        "# Prices of collectives against published times", "", described("numpy"), "",
        "## Every second size left out of each measured table", "", *of_curves(), "",
        "## All_reduce between nodes", "", *of_figures(all_reduces()), "",
        "## Dispatch to experts and back", "", *of_figures(dispatches()), "",
    ]  # fmt: skip
    text = "\n".join(parts)
    print(text)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
