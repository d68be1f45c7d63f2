"""The spread of each term of a step, fitted to runs that were left out of the fit of the efficiencies.

Maximum likelihood of a Laplace distribution of log(measured / predicted) whose variance is a sum over terms, by
multiplicative steps that never lower the likelihood; then one scale with which the stated share of them is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpsearch.cluster.efficiency import SPREAD, Efficiency, doubts_of, efficiency_of
from hpsearch.errors import PlanError
from hpsearch.estimate.band import STATED, TERMS, band, doubt, term_shares
from hpsearch.estimate.fit import FREE
from hpsearch.estimate.price import Floats
from hpsearch.validate.held_out import HeldOut, Measured, by_generation, calibrated
from hpsearch.validate.score import summary

NAMES = (*TERMS, "floor")
PRIOR = dict.fromkeys(TERMS, 0.08) | {"floor": 0.03}
"""Spread of a term that no run has much of."""
PRIOR_ROWS = 3.0
"""How many runs, each made of one term alone, the prior is worth."""
STEPS = 2000
EXPONENT = 2 / 3
"""Of a multiplicative step: log S is bounded by its tangent, |e|/√S term by term; the bound is least there."""
FEWEST = 30
"""Held-out runs that a spread can be read from."""


@dataclass(frozen=True)
class Spreads:
    """What `[band]` of `efficiency.toml` holds."""

    sigma: tuple[tuple[str, float], ...]
    """Standard deviation of the log, by term, and the floor."""
    scale: float
    """Of them from the middle of the band to its end."""
    rows: int

    def __str__(self) -> str:
        lines = [
            f'band.{name} = {{ value = {value:.3f}, unit = "standard deviation of the log", kind = "fitted", '
            f"rows = {self.rows} }}"
            for name, value in self.sigma
        ]
        lines.append(
            f'band.scale = {{ value = {self.scale:.3f}, unit = "standard deviations", kind = "fitted", '
            f"rows = {self.rows} }}"
        )
        return "\n".join(lines)


def fit_spreads(squares: Floats, known: Floats, error: Floats) -> Spreads:
    """`squares` [runs, terms]: squared share of each term; `known` [runs]: variance that is not to be fitted; `error`
    [runs]: log of measured over predicted. PlanError: too few runs."""
    if len(error) < FEWEST:
        raise PlanError(
            "bands", f"expected at least {FEWEST} runs that were left out, but found {len(error)}", "Add families."
        )
    x = np.vstack([np.hstack([squares, np.ones((len(error), 1))]), np.eye(len(NAMES))])
    c = np.concatenate([known, np.zeros(len(NAMES))])
    e = np.concatenate([np.abs(error), [PRIOR[name] / np.sqrt(2) for name in NAMES]])
    weight = np.concatenate([np.ones(len(error)), np.full(len(NAMES), PRIOR_ROWS)])
    variance = np.array([PRIOR[name] ** 2 for name in NAMES])
    for _ in range(STEPS):
        total = x @ variance + c
        up, down = (weight * np.sqrt(2) * e * total**-1.5) @ x, (weight / total) @ x
        variance = variance * (up / down) ** EXPONENT
    total = (x @ variance + c)[: len(error)]
    scale = float(np.quantile(np.abs(error) / np.sqrt(total), STATED))
    return Spreads(tuple(zip(NAMES, np.sqrt(variance).tolist(), strict=True)), scale, len(error))


def spreads_of(found: Sequence[HeldOut]) -> Spreads:
    """Of runs that were left out; the shares of their terms by the numbers in use."""
    squares, known = [], []
    for one in found:
        device, layout = one.run.case.cluster.device.name, one.run.case.layout
        step_s, parts = one.run.priced.step(efficiency_of(device))
        squares.append([share**2 for share in term_shares(step_s, parts).values()])
        known.append(doubt(step_s, parts, doubts_of(device), layout.low_precision))
    error = -np.log1p([one.error for one in found])
    return fit_spreads(np.array(squares).reshape(-1, len(TERMS)), np.array(known), error)


def bands_report(runs: Sequence[Measured], left_out: Sequence[HeldOut]) -> str:
    """`[band]` as TOML, and how many runs lie inside the band in use, in sample and left out."""
    held = {id(one.run): one.error for one in left_out}
    inside: list[tuple[Measured, bool, bool | None, float]] = []
    for run in runs:
        device, layout = run.case.cluster.device.name, run.case.layout
        step_s, parts = run.priced.step(efficiency_of(device))
        low, high = band(step_s, parts, doubts_of(device), layout.low_precision)
        error = held.get(id(run))
        out = None if error is None else low / step_s <= 1 / (1 + error) <= high / step_s
        inside.append((run, low <= run.seconds <= high, out, high / step_s - 1))
    lines = [str(spreads_of(left_out)), "", f"{'inside the band in use, of runs':<40}{'rows':>6}{'in sample':>11}"]
    lines[-1] += f"{'left out':>10}{'half width':>12}"
    named: list[tuple[str, Callable[[Measured], str]]] = [
        ("all", lambda run: ""), ("family", lambda run: run.family), ("device", lambda run: run.kind),
    ]  # fmt: skip
    for title, key in named:
        for name in sorted({key(run) for run in runs}):
            mine = [one for one in inside if key(one[0]) == name]
            known = [one[2] for one in mine if one[2] is not None]
            share = f"{np.mean(known):>10.0%}" if known else f"{'':>10}"
            lines.append(
                f"  {f'{title} {name}'.strip():<38}{len(mine):>6}{np.mean([one[1] for one in mine]):>11.0%}{share}"
                f"{np.median([one[3] for one in mine]):>12.1%}"
            )
    return "\n".join(lines)


def generations_report(runs: Sequence[Measured]) -> str:
    """Each device generation as one that nobody ran: with the geometric means of the others' numbers, all in doubt."""
    groups = by_generation(runs)
    fits = {name: calibrated(mine).fitted for name, mine in groups.items() if len(mine) >= len(FREE)}
    doubts = {number: SPREAD[number] for number in (*FREE, "clock")}
    lines = [f"{'generation nobody ran':<40}{'rows':>6}{'inside':>11}{'median':>10}{'half width':>12}"]
    for name, mine in groups.items():
        logs = {
            number: [
                np.log(getattr(f.efficiency, number)) for g, f in fits.items() if g != name and number not in f.kept
            ]
            for number in FREE
        }
        means = {number: float(np.exp(np.mean(found))) for number, found in logs.items() if found}
        inside, widths, errors = [], [], []
        for run in mine:
            step_s, parts = run.priced.step(replace(Efficiency(), **means))
            low, high = band(step_s, parts, doubts, run.case.layout.low_precision)
            inside.append(low <= run.seconds <= high)
            widths.append(high / step_s - 1)
            errors.append(step_s / run.seconds - 1)
        told = f"{np.mean(inside):>11.0%}{summary(errors)['median']:>10.1%}{np.median(widths):>12.1%}"
        lines.append(f"  {name:<38}{len(mine):>6}{told}")
    return "\n".join(lines)
