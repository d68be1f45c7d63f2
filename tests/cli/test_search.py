"""`hpsearch search` and `hpsearch rules`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpsearch.space import RULES
from hpsearch.space.layout_file import load
from tests.cli.conftest import Command
from tests.cli.test_estimate import CONFIG, JOB


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_the_best_layout_with_its_proof_and_its_file(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file, again = tmp_path / "layout.json", tmp_path / "again.json"
    found = hpsearch("search", "--model", config, *JOB, "-o", file)
    assert found.code == 0, found.stderr
    said = " ".join(found.stdout.split())
    for words in ("LlamaForCausalLM on 16 devices of h100-sxm-ib400:", "Proven: no layout of the space takes less than",
                  "considered", "Refused by heads", f"Written to {file}."):  # fmt: skip
        assert words in said
    assert hpsearch("search", "--model", config, *JOB, "-o", again).code == 0
    assert file.read_bytes() == again.read_bytes()

    written = load(file)
    assert written.read().devices <= 16
    assert written.certificate.bound_s <= written.step_s
    priced = hpsearch("estimate", "--model", config, *JOB, "--layout", file)
    assert priced.code == 0, priced.stderr
    assert "It fits" in priced.stdout


def test_pins_narrow_the_space(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    found = hpsearch("search", "--model", config, *JOB, "--fix", "tp=2+4,pp=2", "--fix", "micro_batch=1", "-o", file)
    assert found.code == 0, found.stderr
    layout = load(file).read()
    assert (layout.pp, layout.micro_batch) == (2, 1)
    assert layout.tp in (2, 4)


def test_a_pinned_schedule_is_found_written_and_priced(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file, pins = tmp_path / "layout.json", "pp=4,micro_batch=1,schedule=zbv+dualpipev,recompute=full,tp=1,cp=1"
    found = hpsearch("search", "--model", config, *JOB, "--fix", pins, "-o", file)
    assert found.code == 0, found.stderr
    layout = load(file).read()
    assert layout.schedule in ("zbv", "dualpipev")
    assert f"pp=4 vpp=2 dp=4 {layout.schedule} ZeRO" in " ".join(found.stdout.split())
    told = hpsearch("estimate", "--model", config, *JOB, "--fix", f"pp=4,vpp=2,schedule={layout.schedule}")
    for priced in (hpsearch("estimate", "--model", config, *JOB, "--layout", file), told):
        assert priced.code == 0, priced.stderr
        assert f"pp=4 vpp=2 {layout.schedule} dp=4" in " ".join(priced.stdout.split())


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("tp=3", "3"),
        ("tq=2", "pin 'tq': expected one of tp, sp, cp"),
        ("tp=two", "pin tp: expected numbers joined by +, but got 'two'"),
        ("sp=maybe", "pin sp: expected true or false, but got 'maybe'"),
        ("schedule=zbw", "pin schedule: expected gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipev"),
        ("schedule=zbv,vpp=4", "pin vpp: expected a legal value for 16 devices and 64 sequences of 256 beside"),
    ],
)
def test_pins_that_cannot_be(hpsearch: Command, config: Path, pin: str, said: str) -> None:
    found = hpsearch("search", "--model", config, *JOB, "--fix", pin)
    assert found.code in (1, 3)
    assert said in found.stderr


def test_a_damaged_layout_file_is_refused(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    assert hpsearch("search", "--model", config, *JOB, "-o", file).code == 0
    whole = file.read_text()
    newer = whole.replace('"schema_version": 1', '"schema_version": 9')
    for damaged, said in ((whole[:200], "is no layout file"), (newer, "expected schema 1, but found 9")):
        file.write_text(damaged)
        found = hpsearch("estimate", "--model", config, *JOB, "--layout", file)
        assert found.code == 1
        assert said in found.stderr
    unknown = ('"tp": ', '"tq": ', "'tq' is unknown")
    broken = (unknown, ('"precision": "bf16"', '"precision": 3', "layout, precision"))
    for old, new, said in broken:
        assert old in whole
        file.write_text(whole.replace(old, new))
        found = hpsearch("estimate", "--model", config, *JOB, "--layout", file)
        assert found.code == 1, found.stdout
        assert said in found.stderr
    file.write_text(whole)
    found = hpsearch("estimate", "--model", config, "--cluster", "h200-sxm-ib400", *JOB[2:], "--layout", file)
    assert "expected cluster = h200-sxm-ib400, but it was searched for h100-sxm-ib400" in found.stderr
    other = [*JOB[:-1], "512"]
    found = hpsearch("estimate", "--model", config, *other, "--layout", file)
    assert "expected seq_len = 512, but it was searched for 256" in found.stderr


def test_rules_are_told(hpsearch: Command) -> None:
    found = hpsearch("rules")
    assert found.code == 0
    assert all(rule.name in found.stdout for rule in RULES)


def test_a_folder_is_no_output(hpsearch: Command, config: Path, tmp_path: Path) -> None:
    for command in ("search", "plan"):
        found = hpsearch(command, "--model", config, *JOB, "-o", tmp_path)
        assert found.code == 1
        assert "cannot be written: it is a folder" in found.stderr
