"""What changed between two profiles: ratios of the second to the first, point by point, summed up by kind. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpsearch.errors import ClusterError
from hpsearch.measure.samples import Samples


@dataclass(frozen=True)
class Change:
    """One point in both profiles."""

    key: str
    first_s: float
    second_s: float

    @property
    def ratio(self) -> float:
        return self.second_s / self.first_s

    @property
    def kind(self) -> str:
        return self.key.split()[0]

    @property
    def differs(self) -> float:
        """Larger over smaller, less 1."""
        return max(self.ratio, 1 / self.ratio) - 1


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    settings: tuple[tuple[str, str, str], ...]
    """(name, first, second) of what the profiles are of, where that differs: torch, ranks, device, …"""

    @property
    def median_differs(self) -> float:
        return median(change.differs for change in self.changes)

    def by_kind(self) -> Iterator[tuple[str, int, float, float, Change]]:
        """(kind, points, median ratio, median difference, the point that changed most) of each kind."""
        for kind in dict.fromkeys(change.kind for change in self.changes):
            of = [change for change in self.changes if change.kind == kind]
            most = max(of, key=lambda change: (change.differs, change.key))
            yield kind, len(of), median(c.ratio for c in of), median(c.differs for c in of), most


def compare(first: Path, second: Path) -> Comparison:
    """The points that both folders measured. ClusterError when there are none, or a folder holds no samples."""
    a, b = Samples.read(first), Samples.read(second)
    best_a, best_b = _best(a), _best(b)
    common = [key for key in best_a if key in best_b]
    if not common:
        raise ClusterError(
            f"profiles {first} and {second}", f"expected points that both measured, but {len(best_a)} and "
            f"{len(best_b)} points have none in common", "Profile both with as many ranks and the same effort.",
        )  # fmt: skip
    names = [name for name in a.header if name in b.header and a.header[name] != b.header[name]]
    return Comparison(
        tuple(Change(key, best_a[key], best_b[key]) for key in common),
        tuple(key for key in best_a if key not in best_b),
        tuple(key for key in best_b if key not in best_a),
        tuple((name, str(a.header[name]), str(b.header[name])) for name in names),
    )


def _best(samples: Samples) -> dict[str, float]:
    """Seconds by point; overlap, which is no time, left out."""
    return {key: seconds for key, seconds in samples.best().items() if key != "overlap"}
