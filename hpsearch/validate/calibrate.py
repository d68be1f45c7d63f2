"""The few efficiencies of one cluster from runs measured on it, and the cluster's file with them.

Numbers start at those of the device generation and stay there unless the runs say more than they do. What the runs do
not exercise, or cannot tell apart from the rest, is said and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import NAMES, Efficiency, OwnNumber, efficiency_of
from hpsearch.cluster.find import FILE_NAME, find
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.schema import EfficiencyEntry
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError, PlanError
from hpsearch.estimate.fit import FREE, ROWS_ALIKE, Fit, fit
from hpsearch.files import atomic_write
from hpsearch.validate.runs import Run

ASKED = (*FREE, "data")
"""Fitted unless others are named: seven numbers."""
EXERCISED = 0.01
"""Least change of some run's step, for a change of the number, that says anything about it."""
NUDGE = 1e-3
SOURCE = "calibration"
"""Key of [sources] in the written file."""


@dataclass(frozen=True)
class Calibration:
    """What runs say about a cluster."""

    runs: tuple[Run, ...]
    before_s: tuple[float, ...]
    """Predicted with the numbers in use until now."""
    after_s: tuple[float, ...]
    fitted: Fit
    unexercised: tuple[str, ...]
    """Numbers that no run's step depends on: kept."""

    @property
    def own(self) -> tuple[OwnNumber, ...]:
        """The fitted numbers."""
        return tuple(OwnNumber(n.name, n.value, n.error) for n in self.fitted.numbers)

    def errors(self, predicted: Sequence[float]) -> list[float]:
        """Of each run, relative to what was measured; positive: predicted slower."""
        return [p / run.seconds - 1 for p, run in zip(predicted, self.runs, strict=True)]


def calibrate(runs: Sequence[Run], cluster: Cluster, free: Sequence[str] = ()) -> Calibration:
    """The `free` numbers (ASKED if none is named) of `cluster` under which `runs` take the times measured.

    PlanError: fewer different runs than numbers they exercise, or a named number that they do not carry.
    """
    prior = efficiency_of(cluster.device.name)
    asked = tuple(dict.fromkeys(free or ASKED))
    if unknown := [name for name in asked if name not in NAMES]:
        raise PlanError("calibrate", f"expected numbers among {', '.join(NAMES)}, but found {unknown[0]}", "")
    shares = _shares(runs, prior, asked)
    names = tuple(name for name in asked if shares[name] >= EXERCISED)
    unexercised = tuple(name for name in asked if name not in names)
    _refuse_too_few(runs, names)
    if not names:
        raise _not_carried(asked, len(runs))
    if free and unexercised:
        raise _not_carried(unexercised, len(runs))
    found = fit(
        [run.priced for run in runs], [run.seconds for run in runs], prior=prior, free=names,
        weights=[ROWS_ALIKE] * len(runs),
    )  # fmt: skip
    if found.kept and (free or not found.numbers):
        raise _not_carried(found.kept, len(runs))
    in_use = efficiency_of(cluster.device.name, cluster.efficiency)
    before = tuple(run.priced.step(in_use)[0] for run in runs)
    after = tuple(run.priced.step(found.efficiency)[0] for run in runs)
    return Calibration(tuple(runs), before, after, found, unexercised)


def _shares(runs: Sequence[Run], prior: Efficiency, names: Sequence[str]) -> dict[str, float]:
    """Of each number: the largest d log step / d log number among the runs."""
    paths = [run.priced.path(prior) for run in runs]
    base = np.array([run.priced.step(prior, path)[0] for run, path in zip(runs, paths, strict=True)])
    found = {}
    for name in names:
        more = replace(prior, **{name: getattr(prior, name) * (1 + NUDGE)})
        moved = np.array([run.priced.step(more, path)[0] for run, path in zip(runs, paths, strict=True)])
        found[name] = float(((moved / base - 1) / NUDGE).max())
    return found


def _refuse_too_few(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Repeats of one layout say nothing more than it does about more numbers."""
    different = len({(run.priced.shape, run.priced.layout) for run in runs})
    if different < len(names):
        again = f" ({len(runs)} with repeats)" if len(runs) > different else ""
        raise PlanError(
            "calibrate", f"expected at least as many different runs as the {len(names)} numbers that they depend on "
            f"({', '.join(names)}), but found {different}{again}",
            "Measure more layouts, or name fewer numbers, the ones that matter most: --free linear.",
        )  # fmt: skip


def _not_carried(names: Sequence[str], runs: int) -> PlanError:
    return PlanError(
        "calibrate", f"expected runs that say more about {', '.join(names)} than is known without them, but "
        f"{runs} runs do not", f"Measure layouts in which they matter, or leave {', '.join(names)} out of --free.",
    )  # fmt: skip


def calibrated_text(text: str, file: str, own: Sequence[OwnNumber], source: str) -> str:
    """The text of a cluster file with `own` numbers, comments kept; `source` says what they were fitted to.

    An older table gives way. ClusterError: the text is no cluster file.
    """
    entry = parse(text, file)
    table = {
        n.name: EfficiencyEntry(
            value=float(f"{n.value:.4g}"), unit="s" if n.name.endswith("_s") else "times the table", kind="fitted",
            source=SOURCE, error=float(f"{n.error:.3g}"),
        )
        for n in own
    }  # fmt: skip
    wanted = entry.model_copy(update={"sources": {**entry.sources, SOURCE: source}, "efficiency": table})
    written = write(wanted)
    comments = [line for line in text.splitlines() if line.startswith("#") and not line.startswith("# hpsearch-")]
    written = "\n".join([*comments, "", written]) if comments else written
    assert parse(written, file) == wanted, "a cluster file that is written reads back as it was"
    read(written, file)
    return written


def source_text(runs: Path, count: int, numbers: int) -> str:
    """For [sources]: which file, by name and content, and how much of it."""
    digest = hashlib.sha256(runs.read_bytes()).hexdigest()[:12]
    return f"fitted to {count} runs of {runs.name} (sha256 {digest}) by hpsearch calibrate: {numbers} numbers"


def write_cluster(folder: Path, cluster: str, found: Calibration, source: str) -> None:
    """A copy of the cluster's folder with the fitted numbers. Its cluster.toml comes last, all or nothing: before that
    the folder is no cluster. ClusterError: it cannot be written."""
    path = find(cluster, found.runs[0].priced.layout.devices)
    text = calibrated_text(path.read_text(encoding="utf-8"), str(path), found.own, source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.name == FILE_NAME and folder.resolve() != path.parent.resolve():
            _copy_beside(path, folder)
        atomic_write(folder / FILE_NAME, text.encode())
    except OSError as error:
        problem = f"expected a folder to write to, but {error.strerror}"
        raise ClusterError(str(folder), problem, "A cluster.toml that was there is as it was.") from error


def _copy_beside(path: Path, folder: Path) -> None:
    """What lies beside a cluster file, samples and environment of a profile, but for the new folder itself."""
    for other in sorted(path.parent.rglob("*")):
        if not other.is_file() or other == path or folder.resolve() in other.resolve().parents:
            continue
        target = folder / other.relative_to(path.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, other.read_bytes())
