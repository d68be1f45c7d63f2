"""A profile as a folder: raw samples, fit, residuals, environment, and the cluster file made of them.

samples.jsonl      every point of every pass, as it was measured
fit.json           latency and bandwidth of every curve, tiers found, repeatability, contention
residuals.json     what the fit leaves unexplained, point by point
environment.json   versions, hosts, load, variables
cluster.toml       what `Cluster.load` reads; written last, so that a profile under way is never taken for one
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpsearch.cluster.find import FILE_NAME
from hpsearch.cluster.read import read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from hpsearch.files import atomic_write
from hpsearch.measure.described import describe
from hpsearch.measure.figures import contention, figures_of, partitions
from hpsearch.measure.fit import Repeats, fits, repeats
from hpsearch.measure.points import FULL, QUICK, Effort
from hpsearch.measure.samples import Samples

EFFORTS = {effort.name: effort for effort in (QUICK, FULL)}
WARN_SPREAD = 0.15
"""Median difference between two passes above which a profile says so."""
MOST_SPREAD = 0.5
"""Above which it is refused: what was measured is what else the machine did."""


def finish(
    folder: Path,
    samples: Samples,
    environment: dict[str, Any],
    *,
    tier_sizes: Sequence[int] = (),
    most_spread: float = MOST_SPREAD,
) -> Repeats:
    """Writes everything beside the samples, `cluster.toml` last; how well the measurement repeats.

    ClusterError, and no cluster.toml, when the median spread between repeats is above `most_spread`, when tiers are no
    blocks of ranks, or when figures cannot be believed.
    """
    effort: Effort = EFFORTS[samples.header["effort"]]
    repeated = repeats(samples)
    found = fits(samples)
    fit: dict[str, Any] = {
        "lines": found["lines"],
        "tiers": [{"domains": p.domains, "factor": p.factor} for p in partitions(samples)],
        "contention": contention(samples),
        "repeatability": {"median": repeated.median, "by_kind": repeated.by_kind, "worst": dict(repeated.worst)},
    }
    fit["not_measured"] = unmeasured(samples)
    _write_json(folder / "environment.json", samples.header | environment)
    _write_json(folder / "fit.json", fit)
    _write_json(folder / "residuals.json", found["residuals"])
    if repeated.median > most_spread:
        worst = ", ".join(f"{key} by {spread:.0%}" for key, spread in repeated.worst[:3])
        raise ClusterError(
            f"profile {folder}",
            f"expected a measurement and its repeat to agree within {most_spread:.0%} in the median, but they differ "
            f"by {repeated.median:.0%} (most: {worst}; load {environment['load_at_start'][0]:.1f} to "
            f"{environment['load_at_end'][0]:.1f} on {environment['cores']:g} cores)",
            "Measure on a quieter machine, into another folder.",
        )
    header = samples.header
    text = write(
        describe(
            figures_of(samples, effort, tier_sizes),
            name=folder.resolve().name,
            summary=f"{header['world']} ranks on {len(set(header['hosts']))} host(s), {header['device_name']}, "
            f"{header['backend']}; {effort.name} profile",
            source=f"measured by hpsearch profile with torch {header['torch']}, {environment['when'][:10]}",
        )
    )
    read(text, f"the profile in {folder}")
    atomic_write(folder / FILE_NAME, text.encode())
    return repeated


def unmeasured(samples: Samples) -> dict[str, list[str]]:
    """Why → the points without a price, in the order they were tried in."""
    found: dict[str, list[str]] = {"out of memory": [], "curve too slow": []}
    for (pass_index, key), sample in sorted(samples.found.items(), key=lambda item: item[0][0]):
        if pass_index == 0 and not sample.seconds:
            found["out of memory" if sample.is_short_of_memory else "curve too slow"].append(key)
    return {why: keys for why, keys in found.items() if keys}


def _write_json(path: Path, content: Any) -> None:
    atomic_write(path, (json.dumps(content, indent=1, default=str) + "\n").encode())
