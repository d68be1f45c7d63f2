"""`hpsearch plan --layout`: a found layout becomes a plan that keeps it, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpsearch.plan import Plan
from hpsearch.space.layout_file import load
from tests.cli.conftest import Command
from tests.cli.test_estimate import CONFIG, JOB


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layout") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_plan_keeps_the_layout(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "layout.json", tmp_path / "plan.json"
    pins = "pp=2,tp=2,cp=1,ep=1,schedule=1f1b+zb-h1,recompute=full,micro_batch=1"
    searched = hpsearch("search", "--model", config, *JOB, "--fix", pins, "-o", file)
    assert searched.code == 0, searched.stderr
    layout = load(file).read()
    planned = hpsearch("plan", "--model", config, *JOB, "--layout", file, "-o", output)
    assert planned.code == 0, planned.stderr
    said = " ".join(planned.stderr.split())
    assert f"it keeps tp=2, dp_shard={layout.dp}" in said
    assert "it decides ZeRO-1: each parameter's own storage" in said
    plan = Plan.load(output)
    stages = plan.file.pipeline
    assert stages is not None
    assert plan.mesh.sizes == {"dp_shard": layout.dp, "tp": 2}
    assert plan.file.job.micro_batches == layout.micro_batches
    assert plan.file.job.fix["cut"] == "+".join(map(str, layout.cut))
    assert plan.file.job.fix["schedule"] == layout.schedule_kind


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("offload=0.5,cp=1", "layout: expected what a program has, but found offloaded activations"),
    ],
)
def test_what_no_program_has_is_refused_by_name(
    hpsearch: Command, config: Path, tmp_path: Path, pins: str, message: str
) -> None:
    file = tmp_path / "layout.json"
    searched = hpsearch("search", "--model", config, *JOB, "--fix", pins, "-o", file)
    assert searched.code == 0, searched.stderr
    refused = hpsearch("plan", "--model", config, *JOB, "--layout", file)
    assert refused.code == 1
    assert message in " ".join(refused.stderr.split())


def test_pins_beside_a_layout_or_another_job_are_refused(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    assert hpsearch("search", "--model", config, *JOB, "--fix", "cp=1,pp=1", "-o", file).code == 0
    both = hpsearch("plan", "--model", config, *JOB, "--layout", file, "--fix", "tp=2")
    assert both.code == 1
    assert "expected a file or pins, but got both" in " ".join(both.stderr.split())
    other = [word if word != "16" else "8" for word in map(str, JOB)]
    refused = hpsearch("plan", "--model", config, *other, "--layout", file)
    assert refused.code == 1
    assert "but it was searched for" in " ".join(refused.stderr.split())
