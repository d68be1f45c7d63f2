"""`hpsearch emit`: the program of one rank as Python to read, and what it refuses."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from hpsearch.graph import store
from hpsearch.plan import Plan
from tests.cli.conftest import Command
from tests.cli.test_plan import JOB, TINY
from tests.plan.sample import plan_file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def planned(hpsearch: Command, config: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    found = hpsearch(
        "plan", "--model", config, *JOB, "--fix", "pp=2,dp_shard=2,schedule=zb-h1,micro_batches=2", "-o", path
    )
    assert found.code == 0, found.stderr
    return path


def _functions(text: str) -> set[str]:
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_a_rank_reads_its_own_stage(hpsearch: Command, config: Path, planned: Path, tmp_path: Path) -> None:
    kept = store.load_graph(store.config_key(store.read_config(config), 16, "bf16"))
    first, last = (hpsearch("emit", planned, "--model", config, "--rank", rank).stdout for rank in (1, 2))
    assert first.startswith("# Rank 1 of 4: pp=0, dp_shard=1. It holds stage 0 of the 2 from 0 on.\n")
    assert last.startswith("# Rank 2 of 4: pp=1, dp_shard=0. It holds stage 1 of the 2 from 0 on.\n")
    schedule = Plan.load(planned).file.pipeline
    assert schedule is not None
    own, other = str(schedule.schedule).splitlines()
    assert f"# {own}\n" in first
    assert f"# {other}\n" in last
    assert "#   backward_weight model.layers.0\n" in first
    assert "#   backward_weight model.layers.1\n" in last
    assert "LlamaDecoderLayer_forward" in _functions(first) & _functions(last)
    assert any(name.startswith("stage_0_") for name in _functions(first))
    assert not any(name.startswith("stage_0_") for name in _functions(last))
    # A capture at the plan's rows is not what later plans start from.
    assert store.load_graph(store.config_key(store.read_config(config), 16, "bf16")) == kept


def test_what_is_written_is_what_is_printed(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    plan, path = tmp_path / "flat.json", tmp_path / "program.py"
    hpsearch("plan", "--model", config, *JOB, "--fix", "dp_shard=4", "-o", plan)
    printed = hpsearch("emit", plan, "--model", config)
    written = hpsearch("emit", plan, "--model", config, "-o", path)
    assert (written.code, written.stdout) == (0, "")
    assert path.read_text() == printed.stdout
    assert "c10d.all_reduce(" in printed.stdout
    assert "# Of one micro-batch, in this order:\n#   gather.issue" in printed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", 4], "hpsearch: rank 4: expected one of the plan's 4 ranks, 0 to 3. Name one."),
        (["--rank", -1], "hpsearch: rank -1: expected one of the plan's 4 ranks, 0 to 3. Name one."),
        (["-o", "no/where.py"], "cannot be written: there is no folder no. Create it first."),
    ],
)
def test_refused_before_a_capture(
    hpsearch: Command, config: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    path = tmp_path / "sample.json"
    Plan(plan_file()).save(path)
    found = hpsearch("emit", path, "--model", config, *arguments)
    assert (found.code, found.stdout) == (1, "")
    assert message in found.stderr


def test_another_model_is_refused(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    Plan(plan_file()).save(path)
    found = hpsearch("emit", path, "--model", config, "--seq-len", 16)
    assert (found.code, found.stdout) == (1, "")
    assert "made for another model" in found.stderr
