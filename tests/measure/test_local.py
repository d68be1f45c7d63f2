"""`local`: this machine measured with real ranks, kept whole, and never left hanging."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpsearch.cluster import COLLECTIVES, Cluster
from hpsearch.cluster.find import is_whole, local_file
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError
from hpsearch.measure import load_cluster, local, local_cluster
from hpsearch.measure.described import describe_local

SIZES = [1024, 65536, 8 * 2**20]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPSEARCH_CACHE", str(tmp_path))
    return tmp_path


def measured(sizes: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    """What rank 0 prints, with round numbers."""
    curve = [2e-4, 4e-4, 2e-2]
    return {
        "torch": "2.13.0",
        "curves": [{"kind": k, "size": s, "nbytes": SIZES, "seconds": curve} for s in sizes for k in COLLECTIVES],
        "matmuls": [
            {"dtype": d, "n": 256, "k": 256, "m": [16, 256], "flops_per_s": [4e9, 2e10]} for d in ("float32", "float64")
        ],
        "memory_bytes_per_s": 5e9,
        "launch_s": 2e-6,
        "attention_flops_per_s": 5e9,
        "overlap": 0.0,
    }


def left_over() -> list[str]:
    """Rank programs that still run as children of this process; the server that tests fork their ranks from is none."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline") for pid in children]
    texts = [command.read_text() for command in commands if command.exists()]
    return [text for text in texts if "rank" in text and "forkserver" not in text]


def test_figures_become_a_cluster_that_prices_them() -> None:
    entry = describe_local(4, 10**9, measured(), "2026-01-01")
    text = write(entry)
    assert parse(text, "x") == entry
    found = read(text, "x")
    cluster = Cluster(found.name, 4, found.device, found.tiers, found.summary, found.facts)
    for kind in COLLECTIVES:
        for size, stride in ((2, 1), (2, 2), (4, 1)):
            price = cluster.collective(kind, 65536, size, stride)
            assert (price.seconds, price.basis) == (pytest.approx(4e-4), "measured")
    assert cluster.matmul_s(256, 256, 256, "float32") == pytest.approx(2 * 256**3 / 2e10)
    assert cluster.device.memory_bytes == 10**9
    assert all(fact.source == "measured by hpsearch with torch 2.13.0, 2026-01-01" for fact in cluster.facts)


def test_one_rank_has_no_groups_and_still_a_description() -> None:
    text = write(describe_local(1, 10**9, measured(()), "2026-01-01"))
    assert read(text, "x").tiers[0].curves == ()


def test_figures_that_cannot_be_believed_are_refused() -> None:
    wrong = measured() | {"launch_s": 5.0}
    with pytest.raises(
        ClusterError, match=r"device\.launch: expected 0\.001 us to 1 ms for one kernel's fixed time, but found"
    ):
        read(write(describe_local(4, 10**9, wrong, "2026-01-01")), "x")


@pytest.mark.dist
def test_two_ranks_measure_this_machine_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster("local", devices=2)
    assert left_over() == []
    assert {(c.kind, c.size) for c in cluster.tiers[0].curves} == {(kind, 2) for kind in COLLECTIVES}
    for kind in COLLECTIVES:
        price = cluster.collective(kind, 8 * 2**20, 2, 1)
        assert price.basis == "measured"
        assert 1e-5 < price.seconds < 30
    for dtype in ("float32", "float64", "bfloat16"):
        assert cluster.matmul_s(512, 512, 512, dtype) > cluster.matmul_s(16, 64, 64, dtype) > 0
    assert 0 <= cluster.device.overlap_efficiency <= 1
    monkeypatch.setattr(local, "measure", lambda *_: pytest.fail("measured a second time"))
    again = load_cluster("local", devices=2)
    assert again == cluster == Cluster.load("local", devices=2)
    assert again.digest == cluster.digest
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["cluster.toml"]


def test_a_half_written_cache_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "measure", lambda *_: measured())
    first = local_cluster(4)
    path = local_file(4)
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert not is_whole(path)
    assert local_cluster(4) == first
    assert path.read_text() == whole


def test_a_full_disk_leaves_the_old_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "measure", lambda *_: measured())
    local_cluster(4)
    before = local_file(4).read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        local_cluster(4, refresh=True)
    assert local_file(4).read_text() == before
    assert len(list(local_file(4).parent.iterdir())) == 1


def program(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Ranks run this code instead; `rank` is defined in it."""

    def command(rank: int, *_: object) -> list[str]:
        return [sys.executable, "-c", f"rank = {rank}\n{code}"]

    monkeypatch.setattr(local, "rank_command", command)


@pytest.mark.dist
def test_a_hung_rank_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        monkeypatch, 'print(\'{"step": "all_gather over 2", "share": 0.1}\', flush=True)\nimport time; time.sleep(60)'
    )
    start = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"expected 2 ranks to finish in 2 s, but they were still at: all_gather over 2"
    ):
        local_cluster(2, timeout_s=2)
    assert time.monotonic() - start < 10
    assert left_over() == []
    assert not local_file(2).exists()


@pytest.mark.dist
def test_a_failing_rank_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "import time, sys\nif rank == 1: sys.exit('no such interface')\ntime.sleep(60)")
    with pytest.raises(ClusterError, match=r"rank 1 of 2 ended with code 1: no such interface\."):
        local_cluster(2, timeout_s=30)
    assert left_over() == []


@pytest.mark.dist
def test_ranks_that_end_without_a_result_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, "pass")
    with pytest.raises(ClusterError, match=r"expected a result from 2 ranks, but they ended at: starting"):
        local_cluster(2, timeout_s=30)


@pytest.mark.dist
def test_ranks_end_by_themselves_when_the_parent_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the parent runs no clean-up; each rank has an alarm of its own."""
    code = (
        "import sys; from hpsearch.measure import local\n"
        f"with local._ranks(1, 3, {str(tmp_path)!r}) as ranks:\n"
        "    print(ranks[0].pid, flush=True); import time; time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(rank) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _runs(rank)


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.parametrize("devices", [0, -1, 65])
def test_device_counts_out_of_range(devices: int) -> None:
    with pytest.raises(ClusterError, match=rf"cluster 'local': expected 1 to 64 devices, but got {devices}"):
        local_cluster(devices)


def test_other_names_are_loaded_as_they_are() -> None:
    assert load_cluster("h100-sxm-roce400", devices=8) == Cluster.load("h100-sxm-roce400", devices=8)
