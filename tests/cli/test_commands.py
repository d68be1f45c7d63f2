"""Every command's exit code and the one line it says when something is wrong; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.find import cost_models
from hpsearch.plan import Plan
from tests.cli.conftest import Command
from tests.plan.sample import plan_file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    Plan(plan_file()).save(path)
    return path


def test_explain_prints_on_stdout(hpsearch: Command, saved: Path) -> None:
    found = hpsearch("explain", saved)
    assert found.code == 0
    assert found.stdout.startswith("Tiny (1,024 parameters) on 4 devices of toy (toy-device): tp=2 x dp_shard=2.")
    assert found.stderr == ""
    assert "\x1b" not in found.stdout


def test_explain_one_parameter_and_the_difference(hpsearch: Command, saved: Path) -> None:
    assert "Stored as tp:S0 dp_shard:S0" in hpsearch("explain", saved, "--why", "layers.0.proj.weight").stdout
    assert "equal, byte for byte" in hpsearch("explain", saved, "--diff", saved).stdout


def test_an_error_is_one_line_on_stderr(hpsearch: Command, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:300])
    found = hpsearch("explain", saved)
    assert found.code == 1
    assert found.stdout == ""
    assert found.stderr.startswith(f"hpsearch: {saved}: expected JSON, but ")
    assert found.stderr.count("\n") == 1


def test_an_unknown_parameter_is_an_error(hpsearch: Command, saved: Path) -> None:
    found = hpsearch("explain", saved, "--why", "nothing.weight")
    assert (found.code, found.stdout) == (1, "")
    assert found.stderr.startswith("hpsearch: parameter nothing.weight: the plan has no such parameter")


PLAN = ["plan", "--model", "m.json", "--cluster", "h100-sxm-roce400", "--devices", 8, "--global-batch", 8]
USAGE = [
    ([], "Usage: hpsearch"),
    (["paln"], "No such command 'paln'"),
    (PLAN, "Missing option '--seq-len'"),
    ([*PLAN, "--seq-len", 0], "Invalid value for '--seq-len'"),
    ([*PLAN, "--seq-len", 8, "--devices", 0], "Invalid value for '--devices'"),
    ([*PLAN, "--seq-len", 8, "--fix", "sp=2"], "fix sp: expected one of"),
    ([*PLAN, "--seq-len", 8, "--model", "no_such_module:build"], "no module named no_such_module"),
    ([*PLAN, "--seq-len", 8, "--model", ":build"], "expected module:callable, but got ':build'"),
    ([*PLAN, "--seq-len", 8, "--model", "json:nothing"], "json has no nothing"),
    ([*PLAN, "--seq-len", 8, "--model", "json:__name__"], "but json:__name__ is str"),
    ([*PLAN, "--seq-len", 8, "--recipe", "fp4"], "expected one of bf16, bf16_grads, fp8, fp32, fp64, but got 'fp4'"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_wrong_usage_ends_with_2(hpsearch: Command, arguments: list[object], message: str) -> None:
    found = hpsearch(*arguments)
    assert found.code == 2
    said = " ".join((found.stdout + found.stderr).replace("│", " ").split())
    assert message in said
    assert "Traceback" not in said


ERRORS = [
    ([*PLAN, "--seq-len", 8, "-o", "nowhere/plan.json"], "nowhere/plan.json: cannot be written: there is no folder"),
    ([*PLAN, "--seq-len", 8, "--cluster", "h100"], "cluster 'h100': expected a path or one of "),
    ([*PLAN, "--seq-len", 8, "--devices", 12], "cluster h100-sxm-roce400: expected up to 8 devices (one node)"),
    (
        [*PLAN, "--seq-len", 8],
        "m.json: expected a Hugging Face config.json or module:callable, but there is no such file",
    ),
    (["clusters", "h200", "--devices", 8], "cluster 'h200': expected a path or one of "),
    (["clusters", "nope"], "cluster 'nope': expected a path or one of "),
    (["clusters", "no/such.toml"], "cluster no/such.toml: expected a file or a folder with cluster.toml, but found"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_an_error_ends_with_1_and_one_line(
    hpsearch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = hpsearch(*arguments)
    assert found.code == 1, found.stderr
    assert found.stderr.startswith(f"hpsearch: {message}")
    assert found.stderr.count("\n") == 1


def test_version(hpsearch: Command) -> None:
    found = hpsearch("--version")
    assert found.code == 0
    assert found.stdout.startswith("hpsearch ")


def test_clusters_lists_what_ships_and_shows_one(hpsearch: Command) -> None:
    found = hpsearch("clusters")
    assert found.code == 0, found.stderr
    for name in ("a100-sxm-selene", "atlas-800-a3", "h100-sxm-roce400", "local"):
        assert name in found.stdout
    shown = hpsearch("clusters", "h100-sxm-roce400", "--devices", 64)
    assert shown.code == 0, shown.stderr
    assert "h100-sxm-roce400: 64 devices" in shown.stdout


def test_an_unknown_cluster_is_answered_with_the_nearest_name(hpsearch: Command) -> None:
    found = hpsearch("clusters", "h100-sxm-roce40")
    assert (found.code, found.stdout) == (1, "")
    assert found.stderr.endswith("but found neither. Did you mean 'h100-sxm-roce400'?\n")


def test_a_described_cluster_is_shown_with_all_its_devices(hpsearch: Command) -> None:
    by_name = hpsearch("clusters", "h100-sxm-roce400")
    by_path = hpsearch("clusters", cost_models() / "h100-sxm-roce400" / "cluster.toml")
    assert by_path.code == 0, by_path.stderr
    assert by_path.stdout == by_name.stdout


def test_clusters_measures_this_machine(hpsearch: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(name: str, devices: int) -> Cluster:
        asked.append((name, devices))
        return Cluster.load("h100-sxm-roce400", devices=2)

    monkeypatch.setattr("hpsearch.measure.load_cluster", measured)
    found = hpsearch("clusters", "local", "--devices", 3)
    assert found.code == 0, found.stderr
    assert asked == [("local", 3)]
    assert "h100-sxm-roce400: 2 devices" in found.stdout
    said = hpsearch("clusters", "local")
    assert said.code == 2
    assert "say how many ranks of this machine to measure." in " ".join(said.stderr.replace("│", " ").split())


def test_ctrl_c_while_importing_ends_with_130_and_one_line(tmp_path: Path) -> None:
    """A module of the command line is interrupted in the middle of its import, under both doors."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hpsearch.cli.clusters':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    for door in (["-m", "hpsearch"], ["-c", "from hpsearch.cli import main; main()"]):
        found = subprocess.run(
            [sys.executable, *door, "clusters"], capture_output=True, text=True, timeout=120, env=environment
        )
        assert (found.returncode, found.stdout, found.stderr) == (130, "", "hpsearch: interrupted.\n")


def test_it_is_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpsearch", "explain", str(tmp_path / "plan.json")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (1, "")
    assert (
        found.stderr
        == f"hpsearch: {tmp_path}/plan.json: cannot be read: No such file or directory. Is it the right path?\n"
    )
