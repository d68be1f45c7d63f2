"""Coverage of the stated 80 % band on the sample, and the command that fits it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.validate.bands import NAMES, bands_report, generations_report
from hpsearch.validate.held_out import HeldOut, Measured, measured
from hpsearch.validate.predict import predict, read_rows
from hpsearch.validate.report import report
from hpsearch.validate.rows import scored
from hpsearch.validate.score import Predicted, band_by, scores

ROWS = Path(__file__).parent / "published.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return read_rows(ROWS)[0]


@pytest.fixture(scope="module")
def found(rows: list[Any]) -> list[Predicted]:
    return list(predict(rows)[0])


@pytest.fixture(scope="module")
def runs(rows: list[Any]) -> list[Measured]:
    return measured(rows)


def test_four_of_five_runs_are_inside(found: list[Predicted], rows: list[Any]) -> None:
    all_runs = band_by(lambda _: "all", found)["all"]
    assert all_runs["rows"] == sum(one.error is not None and scored(one.row) for one in found) > 50
    assert 0.7 <= all_runs["inside"] <= 0.95
    assert 0.05 < all_runs["half_width"] < 0.35, "a band that says something"
    assert scores(found, rows)["band"] == {"stated": 0.8, **all_runs}
    assert f"band: stated 0.800, rows {all_runs['rows']}" in report(found, {}, rows)


def test_inside_is_between_the_ends(found: list[Predicted]) -> None:
    for one in found:
        if one.error is None:
            assert one.inside is None
            continue
        estimate, measured_s = one.estimate, one.case.measured_s
        assert measured_s is not None
        assert one.inside == (estimate.low_s <= measured_s <= estimate.high_s)
        assert estimate.low_s < estimate.step_s < estimate.high_s


def test_bands_as_toml(runs: list[Measured]) -> None:
    """With errors in place of a slow fit: the table of every term, then who is inside."""
    left_out = [
        HeldOut(run, run.priced.step(efficiency_of(run.case.cluster.device.name))[0] / run.seconds - 1)
        for run in runs[10:]
    ]
    toml, _, told = bands_report(runs, left_out).partition("\n\n")
    table = tomllib.loads(toml)["band"]
    assert set(table) == {*NAMES, "scale"}
    assert all(entry["value"] > 0 and entry["rows"] == len(left_out) for entry in table.values())
    assert "left out" in told
    assert "device H100" in told


@pytest.mark.slow
def test_a_generation_that_nobody_ran(found: list[Predicted], runs: list[Measured]) -> None:
    """Most of its runs are inside a band that is wider than that of devices whose numbers were fitted."""
    lines = generations_report(runs).splitlines()[1:]
    told = {words[0]: [float(word.rstrip("%")) / 100 for word in words[2:]] for words in map(str.split, lines)}
    assert list(told) == sorted({run.generation for run in runs})
    assert sum(told[run.generation][0] for run in runs) / len(runs) > 0.6
    known = band_by(lambda _: "all", found)["all"]["half_width"]
    assert min(half for _, _, half in told.values()) > 1.2 * known
