"""A profile from points to a cluster that prices what was measured; interrupted, repeated, refused, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpsearch.cluster import COLLECTIVES, Cluster
from hpsearch.cluster.cluster import curve_shape
from hpsearch.errors import ClusterError
from hpsearch.measure.compare import compare
from hpsearch.measure.fit import fit_line, repeats
from hpsearch.measure.points import FULL, QUICK, Place, group_shapes, pair_rounds, points
from hpsearch.measure.profile import finish
from hpsearch.measure.samples import FILE_NAME, Sample, Samples
from hpsearch.measure.session import Work, disagreeing
from tests.measure import synthetic

REPO = Path(__file__).parents[2]
ONE_HOST, TWO_HOSTS = ["a"] * 4, ["a"] * 4 + ["b"] * 4


# What is measured


def test_group_shapes_are_those_of_mesh_axes() -> None:
    assert group_shapes(4) == ((2, 1), (2, 2), (4, 1))
    assert group_shapes(6) == ((2, 1), (2, 3), (3, 1), (3, 2), (6, 1))
    assert group_shapes(1) == ()
    assert len(group_shapes(1024)) == 55


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_rounds_of_pairs_hold_each_pair_once_and_no_rank_twice(world: int) -> None:
    rounds = pair_rounds(world)
    pairs = sorted(pair for some in rounds for pair in some)
    assert pairs == [(a, b) for a in range(world) for b in range(a + 1, world)]
    assert all(len({rank for pair in some for rank in pair}) == 2 * len(some) for some in rounds)


@pytest.mark.parametrize("effort", [QUICK, FULL])
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_point_has_a_name_of_its_own_and_every_collective_every_shape(effort, device: str) -> None:  # type: ignore[no-untyped-def]
    found = list(points(Place(8, device, 8 * 10**9), effort))
    assert len({point.key for point in found}) == len(found)
    measured = {(p.kind, p.shape) for p in found if p.kind in (*COLLECTIVES, "broadcast")}
    assert measured == {(kind, shape) for kind in (*COLLECTIVES, "broadcast") for shape in group_shapes(8)}
    assert min(p.nbytes for p in found if p.kind == "all_reduce") == 512
    kinds = {p.kind for p in found}
    assert ({"to_device", "to_host"} <= kinds) == (device != "cpu")
    assert {"pair", "matmul", "attention", "add", "copy", "sum", "launch", "overlap", "chain"} <= kinds


# What comes out


def test_a_profile_prices_what_it_measured(tmp_path: Path) -> None:
    samples = synthetic.samples(tmp_path, ONE_HOST)
    finish(tmp_path, samples, synthetic.ENVIRONMENT)
    cluster = Cluster.load(tmp_path, devices=4)
    assert [(tier.name, tier.size, tier.link) for tier in cluster.tiers] == [("node", 4, "memory")]
    place = Place(4, "cpu", 4 * 10**9)
    for point in points(place, QUICK):
        if point.kind in COLLECTIVES:
            price = cluster.collective(point.kind, point.nbytes, *point.shape)
            assert price.seconds == pytest.approx(synthetic.seconds_of(point, ONE_HOST)), point.key
            assert price.basis == "measured"
    cold = synthetic.LAUNCH_S - (1e-6 + 4096 / synthetic.STREAM_BYTES_PER_S)
    expected = cold + 2e-6 + 2 * 256**3 / synthetic.MATMUL_FLOPS_PER_S
    assert cluster.matmul_s(256, 256, 256, "float32") == pytest.approx(expected)
    assert cluster.memory_bound_s(2097152) == pytest.approx(cold + 1e-6 + 2097152 / synthetic.STREAM_BYTES_PER_S)
    assert cluster.launch_s == pytest.approx(synthetic.LAUNCH_S)
    assert cluster.device.overlap_efficiency == 0.25
    for shape in group_shapes(4):
        assert cluster.device.arrival_of(*shape) == pytest.approx(synthetic.waiting_s(*shape))
    assert cluster.device.arrival_s == pytest.approx(synthetic.waiting_s(4, 1)), "of groups that were not measured"
    assert cluster.device.arrival_of(1, 1) == 0.0
    assert cluster.device.memory_bytes == 4 * 10**9


def test_nobody_comes_later_than_a_round_computes(tmp_path: Path) -> None:
    """What other programs took from a chain is not waiting."""
    samples = synthetic.samples(tmp_path, ONE_HOST)
    for (index, key), one in list(samples.found.items()):
        if key == "chain 4x1":
            samples.found[index, key] = Sample(index, key, tuple(s + 1.0 for s in one.seconds), one.more)
    finish(tmp_path, samples, synthetic.ENVIRONMENT)
    device = Cluster.load(tmp_path, devices=4).device
    assert device.arrival_of(4, 1) == pytest.approx(synthetic.COMPUTE_S)
    assert device.arrival_of(2, 1) == pytest.approx(synthetic.waiting_s(2, 1))


def test_every_number_is_measured_and_says_where(tmp_path: Path) -> None:
    finish(tmp_path, synthetic.samples(tmp_path, TWO_HOSTS), synthetic.ENVIRONMENT)
    facts = Cluster.load(tmp_path, devices=8).facts
    assert {fact.kind for fact in facts} == {"measured"}
    assert {fact.source for fact in facts} == {"measured by hpsearch profile with torch 2.13.0, 2026-01-02"}
    assert all(fact.unit for fact in facts)


def test_two_hosts_are_two_tiers_with_the_curves_of_each(tmp_path: Path) -> None:
    finish(tmp_path, synthetic.samples(tmp_path, TWO_HOSTS, seed=0), synthetic.ENVIRONMENT)
    cluster = Cluster.load(tmp_path, devices=8)
    node, fabric = cluster.tiers
    assert (node.name, node.size, fabric.name, fabric.size) == ("node", 4, "fabric", 8)
    assert (node.link, fabric.link) == ("memory", "ethernet")
    assert fabric.latency_s / node.latency_s == pytest.approx(synthetic.ACROSS, rel=0.2)
    assert node.bytes_per_s / fabric.bytes_per_s == pytest.approx(synthetic.ACROSS, rel=0.3)
    assert {(c.size, c.stride) for c in node.curves} == {(2, 1), (2, 2), (4, 1)}
    assert {(c.size, c.stride) for c in fabric.curves} == {(2, 4), (4, 2), (8, 1)}
    assert {curve_shape((4, 8), c).counts for c in fabric.curves} == {(2, 1)}


def test_a_fast_domain_that_no_host_name_tells_is_found(tmp_path: Path) -> None:
    """One host name for all, as in containers of one image: messages alone show the two nodes."""
    samples = synthetic.samples(tmp_path, TWO_HOSTS, seed=1)
    samples.header["hosts"] = ["same"] * 8
    finish(tmp_path, samples, synthetic.ENVIRONMENT)
    assert [tier.size for tier in Cluster.load(tmp_path, devices=8).tiers] == [4, 8]


def test_tiers_by_hand_win(tmp_path: Path) -> None:
    finish(tmp_path, synthetic.samples(tmp_path, TWO_HOSTS), synthetic.ENVIRONMENT, tier_sizes=(2, 4, 8))
    assert [tier.size for tier in Cluster.load(tmp_path, devices=8).tiers] == [2, 4, 8]


def test_ranks_dealt_out_over_hosts_are_refused(tmp_path: Path) -> None:
    samples = synthetic.samples(tmp_path, ["a", "b"] * 4)
    with pytest.raises(
        ClusterError, match=r"tiers: expected domains of equally many neighbouring ranks, but messages "
    ):
        finish(tmp_path, samples, synthetic.ENVIRONMENT)
    assert not (tmp_path / "cluster.toml").exists()


# Repeatability


def test_the_spread_is_that_of_the_two_best_passes() -> None:
    found = Samples(Path("x"), {})
    for index, seconds in enumerate((1.0, 3.0, 1.1)):
        found.found[index, "launch"] = Sample(index, "launch", (9.0, seconds))
    assert repeats(found).by_kind == {"launch": pytest.approx(0.1)}


def test_a_profile_that_does_not_repeat_is_refused_with_numbers(tmp_path: Path) -> None:
    samples = synthetic.samples(tmp_path, ONE_HOST)
    for (index, key), one in list(samples.found.items()):
        if index > 0 and key != "overlap":
            samples.found[index, key] = Sample(index, key, tuple(1.8 * s for s in one.seconds), one.more)
    message = (
        r"agree within 50% in the median, but they differ by 80% \(most: .* by 80%, .*; load 0\.1 to 0\.2 on 2 cores"
    )
    with pytest.raises(ClusterError, match=message):
        finish(tmp_path, samples, synthetic.ENVIRONMENT)
    assert not (tmp_path / "cluster.toml").exists()
    repeated = finish(tmp_path, samples, synthetic.ENVIRONMENT, most_spread=0.9)
    assert repeated.median == pytest.approx(0.8)
    assert json.loads((tmp_path / "fit.json").read_text())["repeatability"]["median"] == pytest.approx(0.8)


def test_points_that_disagree_are_measured_once_more_the_worst_first() -> None:
    place = Place(1, "cpu", 10**9)
    keys = [point.key for point in points(place, QUICK)]
    done = {(index, key): (1.0,) for index in (0, 1) for key in keys}
    done[1, keys[5]], done[0, keys[2]], done[1, keys[8]] = (1.2,), (2.0,), (1.05,)
    last = QUICK.passes + QUICK.more_passes
    assert [(w.pass_index, w.point.key) for w in disagreeing(place, QUICK, done)] == [(last, keys[2]), (last, keys[5])]
    assert all(isinstance(work, Work) for work in disagreeing(place, QUICK, done))


# Fits


def test_a_line_is_found_with_its_residuals() -> None:
    sizes = [512 * 4**i for i in range(8)]
    exact = fit_line(sizes, [5e-6 + n / 1e9 for n in sizes])
    assert (exact.start_s, exact.bytes_per_s) == (pytest.approx(5e-6), pytest.approx(1e9))
    assert exact.worst_residual < 1e-9
    bent = fit_line(sizes, [(5e-6 + n / 1e9) * (1.5 if i == 3 else 1.0) for i, n in enumerate(sizes)])
    assert bent.residuals[3] == pytest.approx(1 / 1.5 - 1, abs=0.12)
    assert bent.median_residual < 0.1 < bent.worst_residual


@pytest.mark.parametrize("seconds", [[3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [1e-6, 1e-3, 4.0]])
def test_a_line_through_points_that_lie_on_none_stays_physical(seconds: list[float]) -> None:
    line = fit_line([1000, 2000, 4000], seconds)
    assert line.start_s >= 0
    assert line.bytes_per_s > 0


# Interruption


def test_samples_go_on_after_half_a_line(tmp_path: Path) -> None:
    head = synthetic.header(ONE_HOST)
    samples = Samples.open(tmp_path, head)
    samples.append(Sample(0, "launch", (1.0, 2.0)))
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole + b'{"pass": 0, "point": "add flo')
    assert Samples.read(tmp_path).found.keys() == {(0, "launch")}
    again = Samples.open(tmp_path, head)
    assert (tmp_path / FILE_NAME).read_bytes() == whole
    again.append(Sample(0, "copy", (3.0,)))
    assert Samples.open(tmp_path, head).best() == {"launch": 1.0, "copy": 3.0}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_half_a_first_line_begins_anew(tmp_path: Path, cut: int) -> None:
    head = synthetic.header(ONE_HOST)
    Samples.open(tmp_path, head)
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole[:cut])
    assert Samples.open(tmp_path, head).found == {}
    assert (tmp_path / FILE_NAME).read_bytes() == whole


def test_samples_of_something_else_are_not_continued(tmp_path: Path) -> None:
    Samples.open(tmp_path, synthetic.header(ONE_HOST))
    with pytest.raises(ClusterError, match=r"expected those of world 8, to go on with them, but found 4"):
        Samples.open(tmp_path, synthetic.header(TWO_HOSTS))


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"expected samples\.jsonl, but found none"):
        Samples.read(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"schema": "hpsearch.samples/1"}\n{"pass": 0}\n')
    with pytest.raises(ClusterError, match="expected JSON lines"):
        Samples.read(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"schema": "other"}\n')
    with pytest.raises(ClusterError, match=r"expected schema hpsearch\.samples/1, but found other"):
        Samples.read(tmp_path)


# Comparison


def test_what_changed_between_two_profiles(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, slower, head in ((first, 1.0, {}), (second, 2.0, {"torch": "2.14.0"})):
        samples = Samples.open(folder, synthetic.header(ONE_HOST) | head)
        samples.append(Sample(0, "launch", (3.0,)))
        for nbytes in (512, 2048, 8192):
            samples.append(Sample(0, f"all_reduce 2x1 {nbytes}B", (nbytes * slower if nbytes > 512 else 512.0,)))
    found = compare(first, second)
    kinds = {kind: (count, ratio, differs, most.key) for kind, count, ratio, differs, most in found.by_kind()}
    assert kinds["launch"] == (1, 1.0, 0.0, "launch")
    assert kinds["all_reduce"] == (3, 2.0, 1.0, "all_reduce 2x1 8192B")
    assert found.settings == (("torch", "2.13.0", "2.14.0"),)
    assert found.median_differs == 0.5
    assert (found.only_first, found.only_second) == ((), ())


# On ranks

TINY = """
import sys
from hpsearch.measure import points, profile
tiny = points.Effort("quick", (512, 4096), (4096,), (16,), 1.0, 0.002, 0.002, 2, 2, 1, 0.0)
points.QUICK = profile.EFFORTS["quick"] = tiny
points.MATMUL_SHAPES = ((64, 64),)
from hpsearch.cli import main
sys.argv = ["hpsearch", "profile", "-o", sys.argv[1], "--quick", "--most-spread", "1000"]
main()
"""


def start_ranks(folder: Path, world: int, port: int) -> list[subprocess.Popen[bytes]]:
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(world):
        own = {k: str(v) for k, v in {"RANK": rank, "LOCAL_RANK": rank, **shared}.items()}
        environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        command = [sys.executable, "-c", TINY, str(folder)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    return ranks


def structure(folder: Path) -> set[tuple[int, str]]:
    return set(Samples.read(folder).found)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_killed_half_way_go_on_to_the_same_profile(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    ranks = start_ranks(folder, 2, free_port())
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and all(rank.poll() is None for rank in ranks):
            if (folder / FILE_NAME).is_file() and len((folder / FILE_NAME).read_bytes().splitlines()) > 12:
                break
            time.sleep(0.01)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    assert not (folder / "cluster.toml").exists()
    before = structure(folder)
    assert before
    with pytest.raises(ClusterError):
        Cluster.load(folder, devices=2)
    kept = (folder / FILE_NAME).read_text().splitlines()[:12]
    for where in (folder, tmp_path / "whole"):
        ranks = start_ranks(where, 2, free_port())
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert (folder / FILE_NAME).read_text().splitlines()[:12] == kept
    assert structure(folder) == structure(tmp_path / "whole") > before
    cluster, whole = (Cluster.load(where, devices=2) for where in (folder, tmp_path / "whole"))
    assert [(c.kind, c.size, c.nbytes) for c in cluster.tiers[0].curves] == [
        (c.kind, c.size, c.nbytes) for c in whole.tiers[0].curves
    ]
    for kind in COLLECTIVES:
        assert 1e-6 < cluster.collective(kind, 4096, 2, 1).seconds < 5
    assert {path.name for path in folder.iterdir()} == {
        "samples.jsonl", "cluster.toml", "fit.json", "residuals.json", "environment.json"
    }  # fmt: skip
