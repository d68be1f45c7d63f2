"""Calibration: numbers that made the steps are found, few runs are refused, and the file written is read back."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpsearch.cluster import Cluster, shipped
from hpsearch.cluster.efficiency import Efficiency, efficiency_of
from hpsearch.cluster.find import FILE_NAME, LOCAL, cost_models
from hpsearch.cluster.read import parse, read
from hpsearch.errors import ClusterError, PlanError
from hpsearch.estimate import estimate, price
from hpsearch.estimate.pins import layout_of
from hpsearch.validate.calibrate import ASKED, calibrate, calibrated_text, source_text, write_cluster
from hpsearch.validate.runs import Run, read_runs
from tests.estimate.test_fit import LLAMA, layouts

NAME = "h100-sxm-ib400"
PRIOR = efficiency_of("H100-SXM5-80GB")
TRUTH = replace(
    PRIOR, linear=1.35, linear_low=1.32, routed=1.8, core=1.3, moved=1.2, links=1.3, data=1.4,
)  # fmt: skip
PUBLISHED = Path(__file__).parent / "published.jsonl"


def cluster() -> Cluster:
    return Cluster.load(NAME, devices=64)


def runs(numbers: Efficiency = TRUTH) -> list[Run]:
    return [Run(f"run {i}", i, one, one.step(numbers)[0]) for i, one in enumerate(layouts())]


def dense(pins: list[dict[str, str]], numbers: Efficiency = TRUTH) -> list[Run]:
    found = []
    for i, pin in enumerate(pins):
        priced = price(LLAMA, layout_of(pin, devices=64, global_batch=512, seq_len=4096).layout, cluster())
        found.append(Run(f"run {i}", i, priced, priced.step(numbers)[0]))
    return found


def test_numbers_that_made_the_steps_are_found() -> None:
    found = calibrate(runs(), cluster())
    assert {n.name for n in found.own} >= {"linear", "linear_low", "routed", "core", "moved", "links"}
    for number in found.own:
        assert number.value == pytest.approx(getattr(TRUTH, number.name), rel=2 * number.error + 0.02), number.name
    assert max(map(abs, found.errors(found.after_s))) < 0.03 < max(map(abs, found.errors(found.before_s)))
    assert {n.name for n in found.own} | set(found.fitted.kept) | set(found.unexercised) == set(ASKED)


def test_one_number_from_one_run() -> None:
    found = calibrate(dense([{"tp": "2", "micro_batch": "4"}], replace(PRIOR, linear=1.4)), cluster(), ["linear"])
    (number,) = found.own
    assert PRIOR.linear + 0.5 * (1.4 - PRIOR.linear) < number.value < 1.41
    assert found.before_s[0] < found.after_s[0] < 1.03 * found.runs[0].seconds


def test_what_no_run_exercises_keeps_its_prior() -> None:
    found = calibrate(dense([{"tp": str(tp), "micro_batch": m} for tp in (1, 2, 4, 8) for m in ("1", "2")]), cluster())
    assert set(found.unexercised) >= {"routed", "linear_low"}
    assert found.fitted.efficiency.routed == PRIOR.routed


def test_fewer_runs_than_numbers_are_refused_with_counts() -> None:
    three = dense([{"tp": "2"}, {"tp": "4"}, {"tp": "8"}])
    with pytest.raises(PlanError, match=r"as the 5 numbers .*\(linear, core, moved, links, data\), but found 3\. "):
        calibrate(three, cluster())
    with pytest.raises(PlanError, match=r"but found 3 \(6 with repeats\)"):
        calibrate(three * 2, cluster())
    assert {n.name for n in calibrate(three, cluster(), ["linear"]).own} == {"linear"}


def test_a_named_number_that_runs_do_not_carry_is_refused() -> None:
    with pytest.raises(PlanError, match="say more about routed than is known without them, but 2 runs do not"):
        calibrate(dense([{"tp": "2"}, {"tp": "4"}]), cluster(), ["routed"])
    with pytest.raises(PlanError, match="found lineal"):
        calibrate(dense([{"tp": "2"}]), cluster(), ["lineal"])


def test_the_written_cluster_is_read_back(tmp_path: Path) -> None:
    found = calibrate(runs(), cluster())
    source = tmp_path / "mine"
    source.mkdir()
    (source / FILE_NAME).write_bytes((cost_models() / NAME / FILE_NAME).read_bytes())
    (source / "raw").mkdir()
    (source / "raw" / "samples.jsonl").write_text("{}\n")
    (tmp_path / "runs.jsonl").write_text("runs")
    told = source_text(tmp_path / "runs.jsonl", len(found.runs), len(found.own))
    write_cluster(tmp_path / "out", str(source), found, told)
    own = Cluster.load(tmp_path / "out", devices=64)
    assert [n.name for n in own.efficiency] == sorted(n.name for n in found.own)
    for number in found.own:
        assert getattr(efficiency_of("H100", own.efficiency), number.name) == pytest.approx(number.value, rel=1e-3)
    assert (tmp_path / "out" / "raw" / "samples.jsonl").read_text() == "{}\n"
    assert [f.source for f in own.facts if f.path == "efficiency.linear"] == [told]
    assert told.startswith("fitted to 40 runs of runs.jsonl (sha256 ")
    one = found.runs[0].priced
    assert estimate(one.shape, one.layout, own).step_s == pytest.approx(found.after_s[0], rel=2e-3)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [FILE_NAME, "raw"], "nothing left behind"
    again = calibrate(runs(), own)
    assert again.own == found.own, "its own numbers are no prior"
    assert again.before_s == pytest.approx(found.after_s, rel=2e-3)
    write_cluster(tmp_path / "out", str(tmp_path / "out"), again, told)
    assert Cluster.load(tmp_path / "out", devices=64) == own


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrate(dense([{"tp": "2"}]), cluster(), ["linear"])
    write_cluster(tmp_path / "out", NAME, found, "fitted to 1 runs of x.jsonl")
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(ClusterError, match=r"No space left on device\. A cluster.toml that was there is as it was"):
        write_cluster(tmp_path / "out", NAME, found, "fitted to 2 runs of y.jsonl")
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before
    assert [p.name for p in (tmp_path / "out").iterdir()] == [FILE_NAME]
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="expected a folder to write to"):
        write_cluster(tmp_path / "file", NAME, found, "fitted to 1 runs of x.jsonl")


@pytest.mark.parametrize("name", [name for name in shipped() if name != LOCAL])
def test_every_shipped_file_takes_numbers(name: str) -> None:
    text = (cost_models() / name / FILE_NAME).read_text()
    found = calibrate(dense([{"tp": "2"}]), cluster(), ["linear"])
    written = calibrated_text(text, name, found.own, "fitted to 1 runs of x.jsonl")
    before, after = parse(text, name), parse(written, name)
    assert after.device == before.device
    assert after.tiers == before.tiers
    assert list(after.efficiency) == ["linear"]
    assert read(calibrated_text(written, name, found.own, "fitted to 2 runs of x.jsonl"), name).efficiency
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in written.splitlines() if line.startswith("#")
    ]


def test_published_rows_of_the_device() -> None:
    found = read_runs(PUBLISHED, NAME)
    assert len(found.used) >= 10
    assert [run.line for run in found.used] == sorted(run.line for run in found.used)
    assert len(found.used) + len(found.left_out) == len(PUBLISHED.read_text().splitlines())
    assert any(why == "a run of A100, not of H100" for _, why in found.left_out)
    fitted = calibrate(found.used, Cluster.load(NAME, devices=8))
    assert 2 <= len(fitted.own) <= 7


def test_a_published_row_of_the_wrong_type_is_refused_by_its_field(tmp_path: Path) -> None:
    row = json.loads(PUBLISHED.read_text().splitlines()[0])
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(row | {"hardware": row["hardware"] | {"devices": "x"}}))
    with pytest.raises(PlanError, match=r"line 1: hardware\.devices: "):
        read_runs(path, NAME)


GOOD = {
    "model": "config.json", "seq_len": 256, "global_batch": 64, "devices": 16, "layout": "tp=2,pp=2,micro_batch=2",
    "step_s": 1.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"step_s": -1.0}, "line 2, step_s: input should be greater than 0, but found -1.0"),
        ({"step_s": "fast"}, "line 2, step_s: "),
        ({"devices": 0}, "line 2, devices: "),
        ({"layot": "x"}, "line 2, layot: expected one of model, seq_len"),
        ({"layout": "tp"}, "line 2, layout: expected name=value"),
        ({"layout": "tp=2,tp=4"}, "line 2, layout: .*each name once"),
        ({"layout": "tq=2"}, "line 2: pin 'tq': expected one of tp"),
        ({"layout": "tp=3"}, "line 2: layout: expected tp·pp·cp to divide 16 devices"),
        ({"model": "none.json"}, "line 2: config .*none.json: cannot be read"),
        ({"precision": "int3"}, "line 2: pin precision"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n" + json.dumps(GOOD | wrong) + "\n")
    with pytest.raises(PlanError, match=told):
        read_runs(path, NAME)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with pytest.raises(PlanError, match="found none"):
        read_runs(path, NAME)
    for text, told in (
        ("", "the file is empty"), ("{", "line 1: expected one JSON object"), ("[1]", "line 1: expected a JSON object, "
        "but found a list"), ('{"model": "x"}', "line 1, seq_len: expected this field, but found only model"),
        ('{"parallel": {}, "hardware": {}}', "line 1: expected a published row, but id, family"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(PlanError, match=told):
            read_runs(path, NAME)
    path.write_text(PUBLISHED.read_text())
    with pytest.raises(PlanError, match=r"expected runs of Ascend.*, but none of .* rows is: .*a run of "):
        read_runs(path, "ascend-910b")
