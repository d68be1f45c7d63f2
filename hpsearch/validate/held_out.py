"""Efficiencies refitted to a file of rows, and predictions of families that were left out of the fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpsearch.cluster.efficiency import Efficiency, device_kind, generation
from hpsearch.estimate import Priced, price
from hpsearch.estimate.fit import FREE, Fit, fit
from hpsearch.validate.predict import cases
from hpsearch.validate.rows import Case, Row, scored
from hpsearch.validate.score import summary

FAMILY_ROWS = 30
"""A family with more rows counts as this many: a large table is not more of the world than a small one."""


@dataclass(frozen=True)
class Measured:
    """A published run that counts for step time, priced."""

    case: Case
    priced: Priced
    seconds: float

    @property
    def family(self) -> str:
        return str(self.case.row["family"])

    @property
    def generation(self) -> str:
        return generation(self.case.cluster.device.name)

    @property
    def kind(self) -> str:
        return device_kind(self.case.cluster.device.name)


@dataclass(frozen=True)
class Calibrated:
    """A generation's numbers and the clock of each kind of its devices that ran."""

    fitted: Fit
    kinds: Mapping[str, Fit]

    def of(self, kind: str) -> Efficiency:
        """A kind that did not run has the generation's clock."""
        return self.kinds[kind].efficiency if kind in self.kinds else self.fitted.efficiency


@dataclass(frozen=True)
class HeldOut:
    """One run predicted from the other families of its generation."""

    run: Measured
    error: float


def measured(rows: Sequence[Row]) -> list[Measured]:
    """The rows that count for step time and can be priced."""
    found = []
    for _, one in cases(row for row in rows if scored(row)):
        if isinstance(one, Case) and one.measured_s:
            found.append(Measured(one, price(one.shape, one.layout, one.cluster), one.measured_s))
    return found


def by_generation(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    groups: defaultdict[str, list[Measured]] = defaultdict(list)
    for run in runs:
        groups[run.generation].append(run)
    return {name: groups[name] for name in sorted(groups)}


def calibrated(runs: Sequence[Measured]) -> Calibrated:
    """The numbers of one generation, then one clock for each kind of device. PlanError: fewer runs than numbers."""
    count = Counter(run.family for run in runs)
    weights = [min(1.0, FAMILY_ROWS / count[run.family]) for run in runs]
    whole = fit([run.priced for run in runs], [run.seconds for run in runs], free=FREE, weights=weights)
    kinds = {}
    for kind in sorted({run.kind for run in runs}):
        mine = [(run, weight) for run, weight in zip(runs, weights, strict=True) if run.kind == kind]
        kinds[kind] = fit(
            [run.priced for run, _ in mine],
            [run.seconds for run, _ in mine],
            prior=whole.efficiency,
            free=("clock",),
            weights=[weight for _, weight in mine],
        )
    return Calibrated(whole, kinds)


def leave_one_out(runs: Sequence[Measured]) -> list[HeldOut]:
    """Every run of a generation that stands in at least two families, predicted without its family."""
    found = []
    for mine in by_generation(runs).values():
        for family in sorted({run.family for run in mine}):
            rest = [run for run in mine if run.family != family]
            if len(rest) < len(FREE):
                continue
            numbers = calibrated(rest)
            found += [
                HeldOut(run, run.priced.step(numbers.of(run.kind))[0] / run.seconds - 1)
                for run in mine
                if run.family == family
            ]
    return found


def held_out_report(found: Sequence[HeldOut]) -> str:
    """Errors of what was left out: by device generation, by kind of device, and family by family."""
    lines = [f"{'left out of the fit':<52}{'rows':>6}{'median':>9}{'p90':>9}{'bias':>9}"]
    groups: dict[str, list[float]] = {"all": [one.error for one in found]}
    for one in found:
        groups.setdefault(f"generation {one.run.generation}", []).append(one.error)
    for one in found:
        groups.setdefault(f"device {one.run.kind}", []).append(one.error)
    for one in found:
        groups.setdefault(f"{one.run.generation} without {one.run.family}", []).append(one.error)
    for name in sorted(groups, key=lambda name: (name != "all", " without " in name, name.startswith("device"), name)):
        s = summary(groups[name])
        lines.append(f"  {name:<50}{s['rows']:>6.0f}{s['median']:>9.1%}{s['p90']:>9.1%}{s['bias']:>+9.1%}")
    return "\n".join(lines)


def refit_text(runs: Sequence[Measured]) -> str:
    """Tables for `efficiency.toml` of every generation with enough runs, with standard errors and residuals."""
    lines, clocks = [], []
    for name, mine in by_generation(runs).items():
        if len(mine) < len(FREE):
            continue
        numbers = calibrated(mine)
        errors = [run.priced.step(numbers.of(run.kind))[0] / run.seconds - 1 for run in mine]
        whole = f"residual = {summary(errors)['median']:.3f}, rows = {len(mine)}"
        carried = {number.name: number for number in numbers.fitted.numbers}
        for key in FREE:
            told = (
                f'kind = "fitted", error = {carried[key].error:.3f}, {whole}' if key in carried else 'kind = "assumed"'
            )
            value = getattr(numbers.fitted.efficiency, key)
            lines.append(f'generation.{name}.{key} = {{ value = {value:.3f}, unit = "times the table", {told} }}')
        lines.append("")
        for kind, one in numbers.kinds.items():
            of_kind = summary(e for run, e in zip(mine, errors, strict=True) if run.kind == kind)
            clocks.append(
                f'device.{kind}.clock = {{ value = {one.efficiency.clock:.3f}, unit = "times the generation", '
                f'kind = "fitted", residual = {of_kind["median"]:.3f}, rows = {of_kind["rows"]:.0f} }}'
            )
    return "\n".join([*lines, *sorted(clocks)])
