"""Coverage of the stated 80 % band on the sample, and the command that fits it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.validate.__main__ import main
from hpsearch.validate.bands import NAMES, bands_report
from hpsearch.validate.held_out import HeldOut, measured
from hpsearch.validate.predict import predict, read_rows
from hpsearch.validate.rows import scored
from hpsearch.validate.score import band_by

ROWS = Path(__file__).parent / "published.jsonl"


def test_four_of_five_runs_are_inside() -> None:
    found, _ = predict(read_rows(ROWS))
    all_runs = band_by(lambda _: "all", found)["all"]
    assert all_runs["rows"] == sum(one.error is not None and scored(one.row) for one in found) > 50
    assert 0.7 <= all_runs["inside"] <= 0.95
    assert 0.05 < all_runs["half_width"] < 0.35, "a band that says something"


def test_inside_is_between_the_ends() -> None:
    found, _ = predict(read_rows(ROWS))
    for one in found:
        if one.error is None:
            assert one.inside is None
            continue
        estimate, measured_s = one.estimate, one.case.measured_s
        assert measured_s is not None
        assert one.inside == (estimate.low_s <= measured_s <= estimate.high_s)


def test_the_report_states_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROWS), "--json"]) == 0
    band = json.loads(capsys.readouterr().out)["band"]
    assert band["stated"] == 0.8
    assert 0.7 <= band["inside"] <= 0.95
    assert main([str(ROWS)]) == 0
    assert "band: stated 0.8" in capsys.readouterr().out


def test_bands_as_toml() -> None:
    """With errors in place of a slow fit: the table of every term, then who is inside."""
    runs = measured(read_rows(ROWS))
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
