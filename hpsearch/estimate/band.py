"""How far a measured step may lie from the predicted one: the band that every estimate carries.

The log of measured over predicted is Laplace-like with variance = floor² + Σ (share of the step · σ)² over the terms,
plus (share · spread)² for every number of the cost model that nothing was fitted to on this device. The σ of a term is
in `cost_models/efficiency.toml`, fitted to runs that were left out of the fit of the numbers (`hpsearch.validate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, sqrt

from hpsearch.cluster.efficiency import content

STATED = 0.8
"""Of measured steps that should lie inside the band."""
TERMS = {
    "matmul": ("matmul", "matmul16", "layer"),
    "experts": ("experts",),
    "core": ("core",),
    "memory": ("moved", "optimizer"),
    "links": ("tp", "cp", "ep", "reduce", "gather"),
    "host": ("stall", "bubble, host", "once"),
}
"""Parts of an estimate that are wrong together. `host`: what is no kernel and no collective: bubbles, issue, waits."""
TERM_OF = {part: term for term, parts in TERMS.items() for part in parts}
NUMBERS = {
    "matmul16": "linear", "experts": "routed", "core": "core", "moved": "moved", "optimizer": "moved", "tp": "links",
    "cp": "links", "ep": "links", "reduce": "data", "gather": "data",
}  # fmt: skip
"""Number of the cost model that scales a part; `matmul` has one by precision."""
CLOCKED = ("matmul", "matmul16", "layer", "experts", "core")
Parts = Sequence[tuple[str, float]]


def term_shares(step_s: float, parts: Parts) -> dict[str, float]:
    """Of the step, by term, in the order of TERMS. KeyError: a part that no term has."""
    found = dict.fromkeys(TERMS, 0.0)
    for name, seconds in parts:
        found[TERM_OF[name]] += max(seconds, 0.0) / step_s
    return found


def doubt(step_s: float, parts: Parts, doubts: Mapping[str, float], low: bool) -> float:
    """Variance of the log step from numbers that nobody fitted. `doubts`: standard deviation of the log of each;
    `low`: linears run in 8 or 4 bit."""
    shares = dict.fromkeys(doubts, 0.0)
    linear = "linear_low" if low else "linear"
    for name, seconds in parts:
        number = linear if name in ("matmul", "layer") else NUMBERS.get(name)
        for one in (number, "clock" if name in CLOCKED else None):
            if one in shares:
                shares[one] += max(seconds, 0.0) / step_s
    return sum((share * doubts[name]) ** 2 for name, share in shares.items())


def log_spread(step_s: float, parts: Parts, doubts: Mapping[str, float], low: bool) -> float:
    """Standard deviation of log(measured / predicted)."""
    spreads = fitted_spreads()
    known = sum((share * spreads[name]) ** 2 for name, share in term_shares(step_s, parts).items())
    return sqrt(spreads["floor"] ** 2 + known + doubt(step_s, parts, doubts, low))


def band(step_s: float, parts: Parts, doubts: Mapping[str, float], low: bool) -> tuple[float, float]:
    """(low, high) seconds around `step_s` that hold the measured step with a probability of STATED."""
    factor = exp(fitted_spreads()["scale"] * log_spread(step_s, parts, doubts, low))
    return step_s / factor, step_s * factor


@cache
def fitted_spreads() -> dict[str, float]:
    """σ of each term, floor and scale (σ from the middle to the end of the band)."""
    return {name: float(entry["value"]) for name, entry in content()["band"].items()}
