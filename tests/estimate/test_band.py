"""The band of an estimate: always around it, wider where less is known, and fitted spreads that made the errors."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import SPREAD, doubts_of
from hpsearch.errors import PlanError
from hpsearch.estimate import estimate, price
from hpsearch.estimate.band import NUMBERS, TERM_OF, TERMS, band, doubt, fitted_spreads, log_spread, term_shares
from hpsearch.estimate.pins import layout_of
from hpsearch.validate.bands import NAMES, fit_spreads
from tests.estimate.test_fit import EXPERTS, LLAMA, TRUTH, layouts

PINS = [
    {}, {"tp": "8"}, {"pp": "8", "vpp": "2"}, {"tp": "4", "cp": "4"}, {"zero": "3"}, {"ep": "8", "precision": "fp8"},
    {"tp": "2", "pp": "4", "micro_batch": "2", "recompute": "full"},
]  # fmt: skip


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("cluster", ["h100-sxm-ib400", "atlas-800-a3"])
def test_low_is_below_expected_below_high(pins: dict[str, str], cluster: str) -> None:
    layout = layout_of(pins, devices=64, global_batch=512, seq_len=4096).layout
    machine = Cluster.load(cluster, devices=64)
    found = estimate(EXPERTS if "ep" in pins else LLAMA, layout, machine)
    assert 0 < found.low_s < found.step_s < found.high_s < 4 * found.step_s
    assert found.high_s / found.step_s == pytest.approx(found.step_s / found.low_s)
    assert found == estimate(EXPERTS if "ep" in pins else LLAMA, layout, machine)
    assert f"{found.low_s:.4g} to {found.high_s:.4g} s with 80%" in str(found)


def test_every_part_of_a_step_has_a_term() -> None:
    names = {name for one in layouts() for name, _ in one.step(TRUTH)[1]}
    layer = price(
        LLAMA, replace(layouts()[1].layout, trained_parts="layer"), Cluster.load("h100-sxm-ib400", devices=64)
    )
    names |= {name for name, _ in layer.step(TRUTH)[1]}
    assert names == set(TERM_OF)
    assert set(NUMBERS) < names
    assert set(fitted_spreads()) == {*NAMES, "scale"}


def test_a_band_by_hand() -> None:
    """A step of half matmul and half core: the variance is a quarter of each, and the floor."""
    spreads = fitted_spreads()
    parts = (("matmul", 1.0), ("core", 1.0))
    spread = sqrt(spreads["floor"] ** 2 + (spreads["matmul"] ** 2 + spreads["core"] ** 2) / 4)
    assert log_spread(2.0, parts, {}, low=False) == pytest.approx(spread)
    low, high = band(2.0, parts, {}, low=False)
    assert (low, high) == pytest.approx((2 * exp(-spreads["scale"] * spread), 2 * exp(spreads["scale"] * spread)))


def test_wider_where_nothing_was_fitted() -> None:
    """Spreads of priors add up: the clock scales both halves, the linears one."""
    parts = (("matmul", 1.0), ("experts", 1.0))
    assert doubt(2.0, parts, {"linear": 0.1}, low=False) == pytest.approx(0.05**2)
    assert doubt(2.0, parts, {"linear": 0.1}, low=True) == 0
    assert doubt(2.0, parts, {"linear_low": 0.2, "clock": 0.1}, low=True) == pytest.approx(0.1**2 + 0.1**2)
    assert doubt(2.0, parts, {"routed": 0.3}, low=False) == pytest.approx(0.15**2)
    layout = layout_of({"tp": "8"}, devices=64, global_batch=512, seq_len=4096).layout
    known, unknown = (estimate(LLAMA, layout, Cluster.load(c, devices=64)) for c in ("h100-sxm-ib400", "atlas-800-a3"))
    assert unknown.high_s / unknown.step_s - 1 > 1.4 * (known.high_s / known.step_s - 1)


def test_what_nobody_fitted() -> None:
    assert doubts_of("Ascend 910C")["linear"] == SPREAD["linear"]
    assert doubts_of("Ascend 910C")["clock"] == SPREAD["clock"]
    assert "linear" not in doubts_of("H100-SXM5-80GB")
    assert "clock" not in doubts_of("H100-SXM5-80GB")
    assert doubts_of("H20")["clock"] == SPREAD["clock"]
    assert doubts_of("A100-SXM4-80GB")["routed"] == SPREAD["routed"], "dense runs say nothing about experts"


def test_shares_add_up_to_the_step() -> None:
    for one in layouts()[:5]:
        step_s, parts = one.step(TRUTH)
        assert sum(term_shares(step_s, parts).values()) == pytest.approx(1)


def test_spreads_that_made_the_errors_are_found() -> None:
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(len(TERMS), 0.7), size=4000)
    truth = np.array([0.10, 0.35, 0.05, 0.15, 0.2, 0.4])
    sigma = np.sqrt((shares**2) @ truth**2 + 0.04**2)
    found = fit_spreads(shares**2, np.zeros(4000), draw.laplace(0, sigma / sqrt(2)))
    for (name, value), true in zip(found.sigma, [*truth, 0.04], strict=True):
        assert value == pytest.approx(true, abs=0.025), name
    assert found.scale == pytest.approx(log(5) / sqrt(2), rel=0.05), "80 % of a Laplace distribution"
    assert "band.experts = { value = 0.3" in str(found)


def test_known_variance_is_not_fitted_again() -> None:
    draw = np.random.default_rng(1)
    error = draw.laplace(0, 0.2 / sqrt(2), 2000)
    squares = np.zeros((2000, len(TERMS)))
    alone = dict(fit_spreads(squares, np.zeros(2000), error).sigma)["floor"]
    beside = dict(fit_spreads(squares, np.full(2000, 0.03), error).sigma)["floor"]
    assert alone == pytest.approx(0.2, rel=0.1)
    assert beside == pytest.approx(0.1, rel=0.2)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 30 runs that were left out, but found 5"):
        fit_spreads(np.zeros((5, len(TERMS))), np.zeros(5), np.zeros(5))
