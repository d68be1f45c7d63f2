"""Links, units and counts of devices as users have them: the slowest link counts, a unit is never guessed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster, Tier
from hpsearch.cluster.read import read
from hpsearch.errors import ClusterError, LegalityError
from hpsearch.estimate import ModelShape
from hpsearch.estimate.shape import transformer
from hpsearch.layout import Mesh
from hpsearch.plan.environment import unmet
from hpsearch.run.choose import check_plan
from hpsearch.space import best
from hpsearch.space.pins import space_of
from tests.cases import configs
from tests.cases.plans import graph_of, h100, search, uneven_cuts
from tests.cluster.test_files import GOOD

FABRIC = 'bandwidth = { value = 50, unit = "GB/s"'
LATENCY = 'latency = { value = 5, unit = "us"'


def two_tiers(inside: float, outside: float, latency_s: float = 1e-6) -> Cluster:
    """Two nodes of 8, bytes a second of one device in each tier."""
    tiers = (Tier("node", 8, "nvlink", inside, latency_s), Tier("fabric", 16, "roce", outside, latency_s))
    device = dataclasses.replace(h100(8).device, collective_launch_s=0.0)
    return Cluster("two", 16, device, tiers)


def test_top_01_one_rank_a_host_pays_the_slow_link() -> None:
    """1 GiB over two ranks: 2 · 1/2 · 1.0737 GB at 50 GB/s are 21.5 ms, at 450 GB/s 2.4 ms."""
    cluster, mesh = two_tiers(450e9, 50e9), Mesh.of(dp_shard=2, tp=8)
    outer, inner = mesh.axis("dp_shard"), mesh.axis("tp")
    assert cluster.tier_of(outer.size, outer.stride).name == "fabric"
    assert cluster.tier_of(inner.size, inner.stride).name == "node"
    assert cluster.collective("all_reduce", 2**30, outer.size, outer.stride).seconds == pytest.approx(21.5e-3, rel=0.01)
    assert cluster.collective("all_reduce", 2**30, 2, 1).seconds == pytest.approx(2.4e-3, rel=0.01)


def curve(op: str, name: str, rate: float) -> Cluster:
    """A node whose table has one size of 1 GB over 8 ranks, stated under `name`."""
    text = GOOD.replace('op = "all_gather"', f'op = "{op}"').replace("    1024,\n    1048576,\n", "    1000000000,\n")
    text = text.replace('time = { values = [10, 17], unit = "us"', f'{name} = {{ values = [{rate}], unit = "GB/s"')
    found = read(text, "x")
    return Cluster(found.name, 8, found.device, found.tiers)


def test_top_03_the_field_says_which_bandwidth() -> None:
    """1 GB over 8 ranks at 100 GB/s of bus bandwidth: all_reduce moves 2 · 7/8 of it, 17.5 ms, the others 7/8, 8.75 ms.
    57.1 GB/s are the same as algorithm bandwidth; taken for bus bandwidth they are 30.6 ms."""
    for op, bus_s, factor in (
        ("all_reduce", 17.5e-3, 1.75),
        ("all_gather", 8.75e-3, 0.875),
        ("reduce_scatter", 8.75e-3, 0.875),
    ):
        assert curve(op, "busbw", 100).collective(op, 1e9, 8, 1).seconds == pytest.approx(bus_s)
        assert curve(op, "algbw", 100 / factor).collective(op, 1e9, 8, 1).seconds == pytest.approx(bus_s)
    assert curve("all_reduce", "busbw", 57.1).collective("all_reduce", 1e9, 8, 1).seconds == pytest.approx(
        30.6e-3, rel=2e-3
    )
    both = GOOD.replace(
        "time = {", 'busbw = { values = [1, 2], unit = "GB/s", kind = "measured", source = "here" }\ntime = {'
    )
    with pytest.raises(ClusterError, match=r"expected one of time, busbw, algbw, but found time, busbw"):
        read(both, "x")
    neither = GOOD.replace("time = { values", "bandwidth = { values")
    with pytest.raises(ClusterError, match=r"collectives\[0\]\.bandwidth: expected a known field"):
        read(neither, "x")


EACH = 'each = { values = [12, 12, 24, 24, 24, 24, 12, 12], unit = "GB/s", kind = "measured", source = "here" }\n'


def test_top_05_the_slowest_member_counts() -> None:
    """Of eight devices two pairs share a NIC of 24 GB/s: a collective waits for them, and the file has to say so."""
    text = GOOD.replace(FABRIC, 'bandwidth = { value = 12, unit = "GB/s"') + EACH
    found = read(text, "x")
    cluster = Cluster(found.name, 16, found.device, found.tiers)
    whole = cluster.collective("all_gather", 16e9, 2, 8)
    assert whole.seconds == pytest.approx(16e9 / 2 / 12e9, rel=0.01)
    with pytest.raises(
        ClusterError,
        match=r"tiers\[1\]\.bandwidth: expected the least of `each`, 12 GB/s, since a collective waits for the "
        r"slowest, but found 24 GB/s",
    ):
        read(text.replace('value = 12, unit = "GB/s"', 'value = 24, unit = "GB/s"'), "x")
    with pytest.raises(ClusterError, match=r"tiers\[1\]\.each: expected 8 values, one a point, but found 7"):
        read(text.replace("[12, 12, 24", "[12, 24"), "x")
    mesh = Mesh.of(dp_shard=2, tp=8)
    assert [mesh.group("dp_shard", rank) for rank in range(8)] == [(rank, rank + 8) for rank in range(8)], "same rails"


@pytest.mark.parametrize(
    "stated",
    [
        'value = 400, unit = "Gbps"',
        'value = 400, unit = "Gbit/s"',
        'value = 50, unit = "GB/s"',
        'value = 5e10, unit = "B/s"',
    ],
)
def test_top_06_units_are_read(stated: str) -> None:
    text = GOOD.replace('value = 50, unit = "GB/s"', stated)
    assert read(text, "x").tiers[1].bytes_per_s == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (FABRIC, 'bandwidth = { value = 400, unit = "GB/s"', r"bandwidth: .* 400 GB/s looks like 400 Gbit/s"),
        (FABRIC, "bandwidth = 400 #", r"bandwidth: expected a table .* found 400\. Every number states its unit"),
        (FABRIC, 'bandwidth = "400Gbps" #', r"bandwidth: expected a table .* found '400Gbps'"),
        (FABRIC, 'bandwidth = { value = -50, unit = "GB/s"', r"bandwidth: expected a positive number, but found -50"),
        (FABRIC, 'bandwidth = { value = 0, unit = "GB/s"', r"bandwidth: expected a positive number, but found 0"),
        (FABRIC, 'bandwidth = { value = nan, unit = "GB/s"', r"bandwidth: expected a finite number, but found nan"),
        (LATENCY, 'latency = { value = 5, unit = "s"', r"latency: .* found 5 s\. 5 s looks like 5 us"),
        (LATENCY, 'latency = { value = 5, unit = "ms"', r"latency: .* found 5 ms\. 5 ms looks like 5 us"),
    ],
)  # fmt: skip
def test_top_06_slips_are_refused_by_name(before: str, after: str, message: str) -> None:
    assert before in GOOD
    with pytest.raises(ClusterError, match=r"tiers\[1\]\." + message):
        read(GOOD.replace(before, after), "x")


@pytest.mark.parametrize(("name", "devices"), [("h100-sxm-ib400", 6), ("h100-sxm-ib400", 7), ("atlas-800-a3", 12)])
def test_top_08_any_count_of_devices(name: str, devices: int) -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2)
    plan = search(model, Cluster.load(name, devices=devices), global_batch=84)
    assert plan.mesh.num_ranks == devices
    assert 32 % plan.mesh.size("tp") == 0
    assert 84 % (plan.mesh.num_data_ranks * plan.file.job.micro_batches) == 0
    assert uneven_cuts(plan, model) == []


def test_top_08_a_batch_that_does_not_divide_is_told() -> None:
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2)
    with pytest.raises(LegalityError, match=r"8.*7"):
        search(model, h100(7), global_batch=8)


def test_top_10_unequal_devices_are_refused() -> None:
    """80 GiB at 989 TFLOP/s beside 48 GiB at 155: one kind of device a cluster, and never silently the first."""
    device = GOOD[GOOD.index("[device]\n") : GOOD.index("[[device.matmul]]")]
    slower = device.replace("value = 80", "value = 48").replace("value = 989", "value = 155")
    both = (device + slower).replace("[device]\n", "[[device]]\n")
    text = GOOD[: GOOD.index("[device]\n")] + both + GOOD[GOOD.index("[[tiers]]") :]
    with pytest.raises(ClusterError) as caught:
        read(text, "mixed.toml")
    assert "device: expected one [device], but found 2 [[device]] tables. Describe the best of" in str(caught.value)
    assert "and as [[groups]] the nodes that have less memory or speed." in str(caught.value)


def test_top_10_unequal_devices_get_unequal_stages(tmp_path: Path) -> None:
    """A node of 80 GB at 989 TFLOP/s beside one of 48 GB at 155: what a search finds, and a plan of like devices."""
    kind = 'kind = "specification", source = "here" }'
    (tmp_path / "cluster.toml").write_text(
        GOOD
        + f"""[[groups]]
name = "large"
nodes = 1
[[groups]]
name = "small"
nodes = 1
memory = {{ value = 48, unit = "GB", {kind}
memory_bandwidth = {{ value = 864, unit = "GB/s", {kind}
compute = {{ value = 0.157, unit = "times the device", {kind}
"""
    )
    cluster = Cluster.load(tmp_path, devices=16)
    shape = ModelShape("small", 4096, 32, 8, 128, 32000, transformer(16, 0, 0), ffn=14336)
    pins = {"pp": "2", "vpp": "1", "micro_batch": "1"}
    layout = best(space_of(shape, cluster, pins, global_batch=64, seq_len=2048), gap=0.05).best.layout
    cut = dict(zip(layout.stage_groups, layout.cut, strict=True))
    assert cut["large"] >= 3 * cut["small"]
    with pytest.raises(ClusterError, match=r"expected devices that are all alike, but it has groups .* large, small\."):
        search(graph_of(configs.LLAMA_8B, num_hidden_layers=2), cluster, global_batch=16)


def test_top_11_the_plan_says_what_its_overlap_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan's JSON, and as a warning before the start where the job's environment says otherwise."""
    model = graph_of(configs.LLAMA_8B, num_hidden_layers=2)
    plan = search(model, h100(2), global_batch=8, fix={"tp": 1, "pp": 1})
    assert json.loads(plan.content)["environment"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "8 to 32"}
    predicted = plan.file.predicted
    assert predicted.step_s < predicted.compute_s + predicted.communication_s
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    without = f"without overlap its step is {predicted.compute_s + predicted.communication_s:.4g} s instead of"
    with pytest.warns(UserWarning, match=f"CUDA_DEVICE_MAX_CONNECTIONS is 1, but .* unset or 8 to 32; {without}"):
        check_plan(plan, model, plan, None)
    for value in ("8", "32"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
        assert unmet(plan.file, os.environ) == ()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    assert unmet(plan.file, os.environ) == ()
    alone = search(model, h100(1), global_batch=2)
    assert alone.file.environment == {}, "nothing to hide on one device"


def test_top_13_latency_counts() -> None:
    """12 us and 50 GB/s: four gathers of 16 KiB are 4 · (12 + 0.16) = 49 us, one of 64 KiB 12 + 0.66 = 13 us."""
    cluster = two_tiers(50e9, 50e9, latency_s=12e-6)
    small, large = (cluster.collective("all_gather", nbytes, 2, 1).seconds for nbytes in (2**14, 2**16))
    assert (4 * small, large) == (pytest.approx(49e-6, rel=0.02), pytest.approx(13e-6, rel=0.03))
    assert large < 4 * small
