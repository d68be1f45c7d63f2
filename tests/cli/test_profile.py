"""`hpsearch profile` as a command: usage, comparison, other sources. Measuring itself is in tests/measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from hpsearch.cli import profile
from hpsearch.cluster import Cluster
from hpsearch.measure.samples import Sample, Samples
from tests.cli.conftest import Command
from tests.measure import synthetic


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_it_needs_a_folder_and_ranks(hpsearch: Command, tmp_path: Path) -> None:
    found = hpsearch("profile")
    assert found.code == 2
    assert "name the folder to write" in found.stderr
    found = hpsearch("profile", "-o", tmp_path / "mine")
    assert found.code == 1
    assert found.stderr.startswith(
        "hpsearch: profile: expected ranks to measure, but no launcher started this process. Start it with torchrun"
    )
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("tiers", ["8,4", "4,6", "0", "four", "4,4"])
def test_tiers_by_hand_are_sizes_that_nest(hpsearch: Command, tmp_path: Path, tiers: str) -> None:
    assert hpsearch("profile", "-o", tmp_path, "--ranks", 2, "--tiers", tiers).code == 2


def test_two_profiles_are_compared(hpsearch: Command, tmp_path: Path) -> None:
    for name, slower in (("a", 1.0), ("b", 1.5)):
        samples = Samples.open(tmp_path / name, synthetic.header(["host"] * 2))
        samples.append(Sample(0, "matmul 64x64x64 float32", (1e-3 * slower,)))
        samples.append(Sample(0, "all_reduce 2x1 512B", (1e-3,)))
    found = hpsearch("profile", "--compare", tmp_path / "a", tmp_path / "b")
    assert found.code == 0
    assert "1.500" in next(line for line in found.stdout.splitlines() if " matmul " in line)
    assert "2 points differ by 25.0% in the median" in found.stdout
    missing = hpsearch("profile", "--compare", tmp_path / "a", tmp_path / "none")
    assert (missing.code, missing.stdout) == (1, "")


def test_an_output_of_nccl_tests_goes_into_a_cluster(hpsearch: Command, tmp_path: Path) -> None:
    table = tmp_path / "all_reduce.txt"
    table.write_text("134217728  33554432  float  sum  -1  1000.0  134.22  234.88  0  1000.0  134.22  234.88  0\n")
    arguments = ("profile", "-o", tmp_path / "mine", "--from-nccl-tests", table)
    assert "Say how many with --group" in hpsearch(*arguments, "--onto", "h100-sxm-ib400").stderr
    assert "with --onto" in hpsearch(*arguments, "--group", 8).stderr
    found = hpsearch(*arguments, "--group", 8, "--onto", "h100-sxm-ib400")
    assert (found.code, found.stderr) == (0, "")
    assert "all_reduce over 8 ranks 1 apart" in found.stdout
    cluster = Cluster.load(tmp_path / "mine", devices=8)
    assert cluster.collective("all_reduce", 134217728, 8, 1).seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(("codes", "starts", "code"), [([0, -6], 2, 0), ([0, 1], 1, 1), ([-11, 0], 3, 11)])
def test_ranks_that_a_fault_of_memory_ends_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], codes: list[int], starts: int, code: int
) -> None:
    """Once is forgiven, always is not; an error is not tried again."""
    begun: list[int] = []

    def once(ranks: int, arguments: list[str]) -> list[int]:
        begun.append(ranks)
        return [0, 0] if len(begun) == 2 and code == 0 else codes

    monkeypatch.setattr(profile, "_once", once)
    if code:
        with pytest.raises(typer.Exit) as end:
            profile._launch(2, [])
        assert end.value.exit_code == code
    else:
        profile._launch(2, [])
        assert "rank 1 was ended by SIGABRT; going on from what was measured." in capsys.readouterr().err
    assert begun == [2] * starts
