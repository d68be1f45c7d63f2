"""The validation report as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpsearch.validate.rows import Row, scored
from hpsearch.validate.score import Predicted, band_by, by, memory_by, scale, scores, sweep_scores

WORST = 10


def table(title: str, groups: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [f"{title:<44}{'rows':>6}{'median':>9}{'p90':>9}{'bias':>9}"]
    for name, s in groups.items():
        lines.append(f"  {name[:42]:<42}{s['rows']:>6.0f}{s['median']:>9.1%}{s['p90']:>9.1%}{s['bias']:>+9.1%}")
    return lines


def report(found: Sequence[Predicted], refused: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Everything a reader needs to believe or doubt the predictions."""
    figures = scores(found, rows)
    step, memory = figures["step_time"], figures["memory"]
    lines = [
        f"{len(found)} of {len(rows)} rows predicted. Step time is scored on completed runs of tier A or B with a "
        f"full layout: {step['predicted']} of {step['rows']}.",
        "step time: " + _words(step),
        "memory: " + _words(memory),
        "sweeps: " + _words(figures["sweeps"]),
        "band: " + _words(figures["band"]),
        "",
        *table("family", figures["families"]),
        *table("device", by(lambda one: str(one.row["hardware"]["device"]), found)),
        *table("kind", by(lambda one: f"{one.row['kind']}, {one.row['workload']}", found)),
        *table("devices", by(scale, found)),
        "",
        *_band_lines(found),
        "",
        *_memory_lines(found),
        "",
        *_sweep_lines(found),
        "",
        f"the {WORST} worst step times",
        *_worst(found),
        "",
        "not predicted",
        *(f"  {count:>5} rows: {why}" for why, count in Counter(refused.values()).most_common()),
        "",
        "defaults filled in",
        *(
            f"  {count:>5} rows: {what}"
            for what, count in Counter(x for o in found for x in o.case.filled).most_common()
        ),
    ]
    return "\n".join(lines)


def _words(figures: Mapping[str, Any]) -> str:
    shown = []
    for name, value in figures.items():
        text = "none" if value is None else f"{value}" if isinstance(value, int) else f"{value:.3f}"
        shown.append(f"{name} {text}")
    return ", ".join(shown)


def _band_lines(found: Sequence[Predicted]) -> list[str]:
    lines = [f"{'inside the band':<44}{'rows':>6}{'inside':>9}{'half':>9}"]
    for key in (lambda o: str(o.row["family"]), lambda o: str(o.row["hardware"]["device"])):
        for name, s in band_by(key, found).items():
            lines.append(f"  {name[:42]:<42}{s['rows']:>6.0f}{s['inside']:>9.0%}{s['half_width']:>9.1%}")
    return lines


def _sweep_lines(found: Sequence[Predicted]) -> list[str]:
    lines = ["sweep" + " " * 81 + "rows spearman  regret"]
    for name, s in sweep_scores(found).items():
        lines.append(f"  {name[-82:]:<82}{s['rows']:>6}{s['spearman']:>9.3f}{s['regret']:>8.1%}")
    return lines


def _memory_lines(found: Sequence[Predicted]) -> list[str]:
    lines = [f"{'memory':<36}{'ran':>6}{'refused':>9}{'ran out':>9}{'fits':>6}{'peaks':>7}{'median':>9}{'lowest':>9}"]
    for name, s in memory_by(lambda one: str(one.row["family"]), found).items():
        counts = f"{s['completed']:>6.0f}{s['refused']:>9.0f}{s['out_of_memory']:>9.0f}{s['false_fits']:>6.0f}"
        errors = f"{s['peak_median']:>9.1%}{s['peak_lowest']:>+9.1%}" if s["peaks"] else ""
        lines.append(f"  {name[:34]:<34}{counts}{s['peaks']:>7.0f}{errors}")
    return lines


def _worst(found: Sequence[Predicted]) -> list[str]:
    wrong = [o for o in found if o.error is not None and scored(o.row)]
    wrong.sort(key=lambda one: (-abs(one.error or 0.0), str(one.row["id"])))
    lines = []
    for one in wrong[:WORST]:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in one.estimate.parts if value)
        measured = one.case.measured_s or 0.0
        lines.append(f"  {one.row['id']}: {one.estimate.step_s:.4g} s for {measured:.4g} s ({one.error:+.0%}): {parts}")
    return lines
