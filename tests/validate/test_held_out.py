"""Families and widths left out of the fit; every ninth step of the grid of arXiv 2312.12391 (MIT licence)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from hpsearch.errors import PlanError
from hpsearch.estimate.fit import FREE
from hpsearch.validate.__main__ import main
from hpsearch.validate.grid import calibration_points, grid_scores, kendall, predicted_s, read_grid
from hpsearch.validate.held_out import (
    FAMILY_ROWS,
    Measured,
    by_generation,
    calibrated,
    held_out_report,
    leave_one_out,
    measured,
    refit_text,
)
from hpsearch.validate.predict import read_rows

HERE = Path(__file__).parent
ROWS, GRID = HERE / "published.jsonl", HERE / "grid.csv"


@pytest.fixture(scope="module")
def runs() -> list[Measured]:
    return measured(read_rows(ROWS)[0])


@pytest.mark.slow
def test_families_left_out(runs: list[Measured]) -> None:
    found = leave_one_out(runs)
    families = {(one.run.generation, one.run.family) for one in found}
    assert len(families) >= 10
    assert len(found) == len({id(one.run) for one in found}), "every run is left out once"
    assert np.median([abs(one.error) for one in found]) <= 0.12
    text = held_out_report(found)
    assert "generation hopper" in text
    assert "ampere without llm-foundry" in text


def test_a_left_out_family_does_not_teach(runs: list[Measured]) -> None:
    """Its measured times may be anything: the prediction of its runs stays."""
    mine = by_generation(runs)["hopper"]
    family = mine[0].family
    rest = [run for run in mine if run.family != family]
    wrong = [run if run.family != family else type(run)(run.case, run.priced, 9 * run.seconds) for run in mine]
    assert calibrated(rest) == calibrated([run for run in wrong if run.family != family])


def test_a_large_family_counts_as_a_few_rows(runs: list[Measured]) -> None:
    mine = by_generation(runs)["ampere"]
    many = max({run.family for run in mine}, key=lambda name: sum(run.family == name for run in mine))
    copies = mine + [run for run in mine if run.family == many] * 3
    assert sum(run.family == many for run in copies) > FAMILY_ROWS
    once, often = calibrated(mine).fitted, calibrated(copies).fitted
    assert often.efficiency.linear == pytest.approx(once.efficiency.linear, rel=0.03)


def test_fewer_than_eight_numbers_a_device(runs: list[Measured]) -> None:
    text = refit_text(by_generation(runs)["hopper"])
    fitted = [line for line in text.splitlines() if 'kind = "fitted"' in line]
    assert sum(line.startswith("generation.hopper") for line in fitted) + 1 < 8
    assert len(FREE) + 1 < 8
    assert "device.H100.clock" in text


def test_the_grid_with_widths_left_out() -> None:
    steps = read_grid(GRID)
    scores = grid_scores(steps, predicted_s(steps))
    assert len(calibration_points(steps)) <= 16
    assert scores["mean"] <= 0.08
    assert scores["kendall"] >= 0.9


def test_the_grid_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GRID), "--grid"]) == 0
    assert "each width left out" in capsys.readouterr().out


def test_a_grid_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="found none"):
        read_grid(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("devices,tp\n8,1\n")
    with pytest.raises(PlanError, match="step_time_s is missing"):
        read_grid(tmp_path / "other.csv")


def test_kendall_by_hand() -> None:
    """Of six pairs, four in the same order and two in the other."""
    assert kendall([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert kendall([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx((4 - 2) / 6)


def test_refit_is_toml(runs: list[Measured]) -> None:
    text = refit_text(by_generation(runs)["blackwell"])
    assert set(tomllib.loads(text)["generation"]["blackwell"]) == set(FREE)
