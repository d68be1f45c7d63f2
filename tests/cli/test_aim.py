"""`hpsearch aim` and `hpsearch together`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster
from hpsearch.space.layout_file import load
from tests.cli.conftest import Command
from tests.cli.test_estimate import CONFIG

REPO = Path(__file__).parents[2]
JOB = ("--cluster", "h100-sxm-ib400", "--devices", 16, "--global-batch", 64, "--seq-len", 2048)
SMALL = ("--fix", "cp=1,vpp=1,recompute=full,micro_batch=1+2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aim") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_fewest_devices(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    found = hpsearch("aim", "devices", "--model", config, *JOB, *SMALL, "--tokens-per-second", 200000, "-o", file)
    assert found.code == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "no fewer devices keep the limit among devices 1, 2, 3, 4, 6, 8, 16" in said
    written = load(file)
    assert written.question.devices <= 16
    assert 64 * 2048 / written.step_s >= 200000
    assert f"LlamaForCausalLM on {written.question.devices} devices" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("batch", "--over", "64,128", "--step-below", "100"), "Proven: no larger batch among global_batch 64, 128"),
        (("sequence", "--over", "2048,4096"), "no longer sequence among seq_len 2048, 4096"),
        (("energy", "--over", "8,16"), "no less energy for a step at 700 W a device (https://"),
        (("cost", "--over", "8,16", "--price", "2 EUR/h"), "no lower price of a step at 2 EUR/h a device (stated)"),
        (("rate", "--over", "8,16"), "tokens/s a device chosen"),
        (("front", "--top", "3"), "Less memory was not looked at"),
        (("plans", "--top", "3"), "The best of different meshes"),
        (("robust",), "1,000 simulations with every price off by up to 10%, each on its own (seed 0)"),
    ],
)
def test_every_objective(hpsearch: Command, config: Path, arguments: tuple[str, ...], words: str) -> None:
    objective, *more = arguments
    found = hpsearch("aim", objective, "--model", config, *JOB, *SMALL, *more)
    assert found.code == 0, found.stderr
    assert words in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("beauty",), "objective 'beauty': expected one of time, robust, rate, cost, energy, devices, batch"),
        (("devices",), "expected a deadline, because one device is the least for any step"),
        (("cost",), "but h100-sxm-ib400 states none. Give --price '2.5 USD/h'"),
        (("time", "--over", "8"), "--over: expected an objective that varies something, but time does not"),
        (("front", "--over", "4..8"), "--over: expected an objective that varies something, but front does not"),
        (("rate", "--price", "2 USD/h"), "--price: expected cost or energy, but rate does not read it"),
        (
            ("front", "--step-below", "1"),
            "--step-below: expected an objective with one answer, but front gives several",
        ),
        (("plans", "--tokens-per-second", "1"), "--tokens-per-second: expected an objective with one answer"),
        (("plans", "-o", "x.json"), "--output: expected an objective with one answer, but plans gives several"),
        (("time", "--imbalance", "2"), "--imbalance: expected robust, but time does not read it"),
        (("time", "--seed", "1"), "--seed: expected robust, but time does not read it"),
        (("time", "--top", "3"), "--top: expected front or plans, but time does not read it"),
        (("batch", "--over", "x"), "--over: expected numbers as 8,16,32"),
        (("devices", "--step-below", "0.0001"), "expected a step of at most 0.0001 s with devices of 1, 2, 3"),
    ],
)
def test_what_is_refused(hpsearch: Command, config: Path, arguments: tuple[str, ...], words: str) -> None:
    objective, *more = arguments
    found = hpsearch("aim", objective, "--model", config, *JOB, *SMALL, *more)
    assert found.code in (1, 3)
    assert words in " ".join(found.stderr.split())


TWICE = '[[modules]]\nname = "reference"\nmodel = "config.json"\nglobal_batch = 16\nseq_len = 2048\n'


def job(folder: Path, config: Path, more: str = "") -> Path:
    path = folder / "job.toml"
    rows = 'model = "config.json"\nglobal_batch = 16\nseq_len = 2048\nfix = { cp = "1", micro_batch = "1+2" }\n'
    (folder / "config.json").write_text(config.read_text())
    path.write_text(
        f'[[modules]]\nname = "reference"\n{rows}trains = false\n{more}'
        f'[[modules]]\nname = "actor"\n{rows}after = ["reference"]\n'
    )
    return path


def test_two_models_together(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    found = hpsearch("together", job(tmp_path, config), "--cluster", "h100-sxm-ib400", "--devices", 16, "-o", file)
    assert found.code == 0, found.stderr
    written = json.loads(file.read_text())
    assert sum(group["devices"] for group in written["split"]) <= 16
    assert set(written["layouts"]) == {"reference", "actor"}
    assert written["certificate"]["bound_s"] <= written["step_s"] == max(task["end_s"] for task in written["tasks"])
    said = " ".join(found.stdout.split())
    for words in ("2 models on 16 devices of h100-sxm-ib400: a step takes", "reference forward",
                  "actor forward and backward", "Proven: no split takes less than", "among groups of 8, 16 devices",
                  "Devices split by a rule, each model apart: equal"):  # fmt: skip
        assert words in said


def test_no_file_where_there_is_no_folder(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    where = ("--cluster", "h100-sxm-ib400", "--devices", 16, "-o", tmp_path / "none" / "answer.json")
    found = hpsearch("together", job(tmp_path, config), *where)
    assert found.code == 1
    assert "cannot be written: there is no folder" in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("generates = true\n", "module reference: expected a module that trains or runs forward, but it generates"),
        ("speed = 3\n", "modules.0.speed: expected a field that there is, but found this one = 3. Fields of"),
        ('after = ["critic"]\n', "expected to wait for modules that stand before it, but 'critic' does not"),
        (
            '[[modules]]\nname = "reference"\n',
            "modules.1.model: expected a value, but there is none (found only: name)",
        ),
        ('runs = "x"\n', "modules.0.runs: expected a valid integer"),
        (TWICE, "module reference: expected names that differ, but it is there twice. Call one of them reference-2."),
        ("x = \n", "expected TOML (or .json), but"),
    ],
)
def test_jobs_that_are_refused(hpsearch: Command, config: Path, tmp_path: Path, more: str, words: str) -> None:
    found = hpsearch("together", job(tmp_path, config, more), "--cluster", "h100-sxm-ib400", "--devices", 16)
    assert found.code == 1
    assert words in " ".join(found.stderr.split())


def test_one_model_on_one_device(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    path = job(tmp_path, config)
    path.write_text(path.read_text().split('[[modules]]\nname = "actor"')[0])
    found = hpsearch("together", path, "--cluster", "h100-sxm-ib400", "--devices", 1)
    assert found.code == 0, found.stderr
    said = " ".join(found.stdout.split())
    for words in (
        "1 model on 1 device of",
        "among groups of 1 device, every",
        "1 split considered, 1 simulated, 1 model ",
    ):
        assert words in said


def test_a_job_without_models(hpsearch: Command, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("")
    found = hpsearch("together", path, "--cluster", "h100-sxm-ib400", "--devices", 16)
    assert found.code == 1
    words = "modules: expected a value, but there is none (found only: nothing). Fields of a [[modules]] table"
    assert words in " ".join(found.stderr.split())


def test_unlike_nodes_are_refused_by_name(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    """With the README's groups, which so are known to load."""
    machine = tmp_path / "unlike"
    machine.mkdir()
    readme = (REPO / "README.md").read_text()
    groups = next(block for block in readme.split("```toml\n") if block.startswith("[[groups]]")).split("```")[0]
    plain = (REPO / "cost_models" / "h100-sxm-ib400" / "cluster.toml").read_text()
    (machine / "cluster.toml").write_text(f"{plain}\n{groups}")
    assert [one.devices for one in Cluster.load(machine, devices=32).groups] == [24, 8]
    where = ("--cluster", machine, "--devices", 32)
    rate = ("rate", "--model", config, *where, *JOB[4:], *SMALL)
    for found in (hpsearch("together", job(tmp_path, config), *where), hpsearch("aim", *rate)):
        assert found.code == 1
        said = " ".join(found.stderr.split())
        assert "expected devices that are alike, to look at " in said
        assert "of 32, but its groups differ: 24 of 'full', 8 of 'slow'. Describe one group" in said
    assert hpsearch("aim", *rate, "--over", 32).code == 0


@pytest.mark.parametrize("kind", ["aim", "together"])
def test_where_nothing_can_be_written(hpsearch: Command, config: Path, tmp_path: Path, kind: str) -> None:
    asked = ("time", "--model", config, *JOB, *SMALL) if kind == "aim" else (job(tmp_path, config), *JOB[:4])
    found = hpsearch(kind, *asked, "-o", "/proc/x.json")
    assert found.code == 1
    assert "/proc/x.json: cannot be written: No such file or directory. What was" in " ".join(found.stderr.split())


def test_the_example_is_a_job(hpsearch: Command) -> None:
    from hpsearch.aim.job_file import load_job

    found = load_job(Path(__file__).parents[2] / "examples" / "together" / "job.toml")
    assert [one.name for one in found.modules] == ["reference", "reward", "critic", "actor"]
    assert all(Path(one.model).is_file() for one in found.modules)
