"""The README's first command, and that it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hpsearch.plan import Plan


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_the_main_job_runs_and_agrees(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpsearch", "quickstart", "-o", str(tmp_path / "plan.json")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "equal (limit 1e-05)" in found.stdout
    assert Plan.load(tmp_path / "plan.json").file.model.name == "LlamaForCausalLM"


@pytest.mark.parametrize(("alone", "code"), [([2.0, 1.0], 0), ([2.0, 1.0001], 1)])
def test_different_losses_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], alone: list[float], code: int
) -> None:
    from hpsearch import measure, quickstart
    from hpsearch.cli.quickstart import quickstart_command
    from tests.plan.sample import plan_file

    monkeypatch.setattr(measure, "load_cluster", lambda name, devices: None)
    monkeypatch.setattr(quickstart, "search", lambda cluster, path: Plan(plan_file()))
    monkeypatch.setattr(quickstart, "train_on_ranks", lambda path: [2.0, 1.0])
    monkeypatch.setattr(quickstart, "train_alone", lambda: alone)
    if code:
        with pytest.raises(typer.Exit) as end:
            quickstart_command(tmp_path / "plan.json")
        assert end.value.exit_code == code
        assert "1.0e-04: NOT EQUAL" in capsys.readouterr().out
    else:
        quickstart_command(tmp_path / "plan.json")
        assert "0.0e+00: equal" in capsys.readouterr().out


@pytest.mark.dist
def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    from hpsearch.errors import LaunchError
    from hpsearch.quickstart import train_on_ranks

    broken = tmp_path / "plan.json"
    broken.write_text(json.dumps({"schema_version": "hpsearch.plan/0"}))
    with pytest.raises(LaunchError, match=r"found the older hpsearch\.plan/0"):
        train_on_ranks(broken)
