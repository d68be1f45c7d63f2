"""`hpsearch calibrate`, from a file of runs to a cluster that estimates follow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.validate.runs import read_runs
from tests.cli.conftest import Command

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32768, "num_hidden_layers": 16,
}  # fmt: skip
LAYOUTS = ["tp=1", "tp=2", "tp=4", "tp=8", "tp=2,pp=2", "tp=2,micro_batch=4", "zero=3,micro_batch=4", "pp=4"]
CLUSTER = "h100-sxm-ib400"
TRUTH = replace(efficiency_of("H100-SXM5-80GB"), linear=1.5, links=1.3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of eight layouts, as a machine with other efficiencies would take."""
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "runs.jsonl"
    entries = [
        {"model": "config.json", "seq_len": 2048, "global_batch": 128, "devices": 16, "layout": layout, "step_s": 1.0,
         "name": f"run of {layout}"}
        for layout in LAYOUTS
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, entries)))
    for entry, run in zip(entries, read_runs(path, CLUSTER).used, strict=True):
        entry["step_s"] = run.priced.step(TRUTH)[0]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_from_runs_to_estimates(hpsearch: Command, runs: Path, tmp_path: Path) -> None:
    found = hpsearch("calibrate", CLUSTER, runs, "-o", tmp_path / "mine")
    assert found.code == 0, found.stderr
    for words in ("run of tp=2,pp=2", "linear", "standard error", "No run depends on linear_low, routed", "Written to"):
        assert words in found.stdout
    own = Cluster.load(tmp_path / "mine", devices=16)
    number = {n.name: n for n in own.efficiency}["linear"]
    assert number.value == pytest.approx(TRUTH.linear, rel=2 * number.error + 0.02)
    job = ["--model", runs.parent / "config.json", "--devices", "16", "--global-batch", "128", "--seq-len", "2048"]
    told = [hpsearch("estimate", *job, "--cluster", name).stdout for name in (CLUSTER, str(tmp_path / "mine"))]
    assert told[0]
    assert told[0] != told[1]
    assert "efficiency.linear" in hpsearch("clusters", tmp_path / "mine").stdout


def test_without_a_folder_nothing_is_written(hpsearch: Command, runs: Path) -> None:
    found = hpsearch("calibrate", CLUSTER, runs, "--free", "linear,links")
    assert found.code == 0, found.stderr
    assert "Nothing written" in found.stdout
    assert "8 runs, 2 numbers" in found.stdout
    assert sorted(path.name for path in runs.parent.iterdir()) == ["config.json", "runs.jsonl"]


def test_too_few_runs(hpsearch: Command, runs: Path, tmp_path: Path) -> None:
    few = runs.with_name("few.jsonl")
    few.write_text("\n".join(runs.read_text().splitlines()[1:3]))
    found = hpsearch("calibrate", CLUSTER, few, "-o", tmp_path / "none")
    few.unlink()
    assert found.code == 1
    assert "but found 2" in found.stderr
    assert not (tmp_path / "none").exists()


def test_a_wrong_line(hpsearch: Command, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"model": 3}')
    found = hpsearch("calibrate", CLUSTER, tmp_path / "runs.jsonl")
    assert found.code == 1
    assert "line 1, model" in found.stderr
