"""Cluster files: what ships loads, what cannot be believed is refused with its line and the likely slip."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster, shipped
from hpsearch.cluster.find import cost_models, find, is_whole, local_file, seal
from hpsearch.cluster.lines import line_of, line_of_paths
from hpsearch.cluster.read import parse, read
from hpsearch.cluster.units import LINKS
from hpsearch.cluster.write import write
from hpsearch.errors import ClusterError

GOOD = """\
schema_version = "hpsearch.cluster/1"
name = "small"
[sources]
here = "https://example.org/numbers"
[device]
name = "gpu"
memory = { value = 80, unit = "GB", kind = "specification", source = "here" }
memory_bandwidth = { value = 3.35, unit = "TB/s", kind = "specification", source = "here" }
memory_efficiency = { value = 0.8, unit = "fraction", kind = "fitted", source = "here" }
matmul_efficiency = { value = 0.8, unit = "fraction", kind = "fitted", source = "here" }
attention_efficiency = { value = 0.4, unit = "fraction", kind = "fitted", source = "here" }
overlap_efficiency = { value = 0.9, unit = "fraction", kind = "fitted", source = "here" }
launch = { value = 4, unit = "us", kind = "measured", source = "here" }
collective_launch = { value = 5, unit = "us", kind = "measured", source = "here" }
[device.peak]
bfloat16 = { value = 989, unit = "TFLOP/s", kind = "specification", source = "here" }
[[device.matmul]]
dtype = "bfloat16"
n = 1024
k = 1024
m = [16, 128]
rate = { values = [10.0, 80.0], unit = "TFLOP/s", kind = "measured", source = "here" }
[[tiers]]
name = "node"
size = { value = 8, unit = "devices", kind = "specification", source = "here" }
link = "nvlink"
bandwidth = { value = 450, unit = "GB/s", kind = "specification", source = "here" }
latency = { value = 3, unit = "us", kind = "measured", source = "here" }
[[tiers.collectives]]
op = "all_gather"
group = 8
nbytes = [
    1024,
    1048576,
]
time = { values = [10, 17], unit = "us", kind = "measured", source = "here" }
[[tiers]]
name = "fabric"
size = { value = 64, unit = "devices", kind = "specification", source = "here" }
link = "roce"
bandwidth = { value = 50, unit = "GB/s", kind = "specification", source = "here" }
latency = { value = 5, unit = "us", kind = "measured", source = "here" }
"""

HOST = 'host_bandwidth = {{ value = {}, unit = "{}", kind = "specification", source = "here" }}\nlaunch = {{ value = 4'

BROKEN = [
    (
        'values = [10.0, 80.0], unit = "TFLOP/s"', 'values = [10.0, 80.0], unit = "GFLOP/s"', 22,
        'found 80 GFLOP/s beside 989 TFLOP/s. GFLOP/s looks like TFLOP/s: write unit = "TFLOP/s"',
    ),
    # wrong units
    ('value = 450, unit = "GB/s"', 'value = 450, unit = "Gbps"', 27,
     "tiers[0].bandwidth: expected 75 GB/s to 2000 GB/s for one device on nvlink, one direction, but found 450 Gbps = "
     '56.25 GB/s. 450 Gbps looks like 450 GB/s: write unit = "GB/s".'),
    ('value = 50, unit = "GB/s"', 'value = 400, unit = "GB/s"', 41,
     "tiers[1].bandwidth: expected 10 GB/s to 110 GB/s for one device on roce, one direction, but found 400 GB/s. "
     '400 GB/s looks like 400 Gbit/s: write unit = "Gbit/s".'),
    ('value = 50, unit = "GB/s"', 'value = 50, unit = "Gbit/s"', 41,
     "tiers[1].bandwidth: expected 10 GB/s to 110 GB/s for one device on roce, one direction, but found 50 Gbit/s = "
     '6.25 GB/s. 50 Gbit/s looks like 50 GB/s: write unit = "GB/s".'),
    ('value = 450, unit = "GB/s"', 'value = 450, unit = "MB/s"', 27,
     "tiers[0].bandwidth: expected 75 GB/s to 2000 GB/s for one device on nvlink, one direction, but found 450 MB/s = "
     '0.45 GB/s. 450 MB/s looks like 450 GB/s: write unit = "GB/s".'),
    ('latency = { value = 3, unit = "us"', 'latency = { value = 3, unit = "ms"', 28,
     "tiers[0].latency: expected 0.05 us to 50 us for one message on nvlink, but found 3 ms. 3 ms looks like 3 us: "
     'write unit = "us".'),
    ('latency = { value = 3, unit = "us"', 'latency = { value = 3, unit = "s"', 28,
     "tiers[0].latency: expected 0.05 us to 50 us for one message on nvlink, but found 3 s. 3 s looks like 3 us: "
     'write unit = "us".'),
    ('latency = { value = 3, unit = "us"', 'latency = { value = 0.003, unit = "us"', 28,
     "tiers[0].latency: expected 0.05 us to 50 us for one message on nvlink, but found 0.003 us. 0.003 us looks like "
     '0.003 ms: write unit = "ms".'),
    ('memory = { value = 80, unit = "GB"', 'memory = { value = 80, unit = "MB"', 7,
     "device.memory: expected 0.134218 GB to 4000 GB for a device's memory, but found 80 MB = 0.08 GB. 80 MB looks "
     "like "
     '80 GB: write unit = "GB".'),
    ('memory = { value = 80, unit = "GB"', 'memory = { value = 80, unit = "GB/s"', 7,
     "device.memory.unit: expected a unit of size (GB, GiB, TB, TiB, MB, MiB, KiB, B), but found 'GB/s', a unit of "
     "bandwidth. Write the unit."),
    ('value = 450, unit = "GB/s"', 'value = 450, unit = "GBs"', 27,
     "tiers[0].bandwidth.unit: expected a unit of bandwidth (GB/s, Gbit/s, Gbps, TB/s, Tbit/s, MB/s, Mbit/s, Mbps, "
     "GiB/s, B/s), but found 'GBs'. Write the unit."),
    ('value = 989, unit = "TFLOP/s"', 'value = 989, unit = "GFLOP/s"', 16,
     "device.peak.bfloat16: expected 0.5 to 5000 FLOP per byte of memory bandwidth, but found 0.989 TFLOP/s beside "
     "3350 "
     'GB/s. 989 GFLOP/s looks like 989 TFLOP/s: write unit = "TFLOP/s".'),
    ('value = 3.35, unit = "TB/s"', 'value = 3.35, unit = "GB/s"', 8,
     "device.memory_bandwidth: expected 0.5 to 5000 FLOP per byte of memory bandwidth, but found 989 TFLOP/s beside "
     "3.35 "
     'GB/s. 3.35 GB/s looks like 3.35 TB/s: write unit = "TB/s".'),
    ('values = [10, 17], unit = "us"', 'values = [10, 17], unit = "ns"', 36,
     "tiers[0].collectives[0].time: expected 0.1 us to 3600 s for one all_gather, but found 10 ns = 0.01 us. 10 ns "
     "looks "
     'like 10 us: write unit = "us".'),
    ('values = [10, 17], unit = "us"', 'values = [10, 17], unit = "ms"', 36,
     "tiers[0].collectives[0].time: expected 0.001 to 1.6 times the link's 450 GB/s as bus bandwidth, but 1048576 "
     "bytes "
     "move at 0.0539708 GB/s. Check the unit 'ms' of the table and 'GB/s' of the link."),
    ('size = { value = 8, unit = "devices"', 'size = { value = 8, unit = "nodes"', 25,
     "tiers[0].size.unit: expected a unit of count (devices), but found 'nodes'. Write the unit."),
    ('launch = { value = 4', HOST.format(512, "GB/s"), 13,
     "device.host_bandwidth: expected 2 GB/s to 128 GB/s for pcie to the host, one direction, but found 512 GB/s. 512 "
     'GB/s looks like 512 Gbit/s: write unit = "Gbit/s".'),
    ('value = 3.35, unit = "TB/s", kind = "specification", source = "here" }\n',
     'value = 900, unit = "GB/s", kind = "specification", source = "here" }\n'
     'host_bandwidth = { value = 128, unit = "GB/s", kind = "specification", source = "here" }\n', 9,
     "device.host_bandwidth: expected at most 1/9 of the 900 GB/s of device memory for PCIe to the host, but found 128 "
     "GB/s. 16 GB/s is 128 Gbit/s: check the unit."),
    ('launch = { value = 4', 'host_link = "usb"\n' + HOST.format(64, "GB/s"), 13,
     f"device.host_link: expected one of {', '.join(LINKS)}, but found 'usb'."),
    ('launch = { value = 4', 'host_link = "nvlink"\n' + HOST.format(3600, "GB/s"), 14,
     "device.host_bandwidth: expected 75 GB/s to 2000 GB/s for nvlink to the host, one direction, but found 3600 GB/s. "
     '3600 GB/s looks like 3600 Gbit/s: write unit = "Gbit/s".'),
    # numbers that are none
    ("value = 450,", "value = -450,", 27,
     "tiers[0].bandwidth: expected a positive number, but found -450. Write the number that was measured."),
    ("value = 450,", "value = 0,", 27,
     "tiers[0].bandwidth: expected a positive number, but found 0. Write the number that was measured."),
    ("value = 450,", "value = nan,", 27,
     "tiers[0].bandwidth: expected a finite number, but found nan. Write the number that was measured."),
    ("latency = { value = 5,", "latency = { value = inf,", 42,
     "tiers[1].latency: expected a finite number, but found inf. Write the number that was measured."),
    ("value = 450,", 'value = "450",', 27,
     "tiers[0].bandwidth.value: input should be a valid number, but found '450'. Correct its type."),
    ("memory_efficiency = { value = 0.8", "memory_efficiency = { value = 80", 9,
     "device.memory_efficiency: expected 0.01 fraction to 1 fraction for an efficiency, but found 80 fraction. Correct "
     "the value or its unit."),
    ("[10.0, 80.0]", "[10.0, -80.0]", 22,
     "device.matmul[0].rate: expected a positive number, but found -80. Write the number that was measured."),
    ("[10.0, 80.0]", "[10.0]", 22, "device.matmul[0].rate: expected 2 values, one a point, but found 1. Complete it."),
    # tables
    ("m = [16, 128]", "m = [128, 16]", 21,
     "device.matmul[0].m: expected growing values, but 16 follows 128. Sort the table."),
    ("    1024,\n", "    2097152,\n", 32,
     "tiers[0].collectives[0].nbytes: expected growing values, but 1048576 follows 2097152. Sort the table."),
    ("group = 8", "group = 16", 29,
     "tiers[0].collectives[0]: expected a group inside the 8 devices of node, but 16 ranks 1 apart need 16. Move it to "
     "an outer tier."),
    ('op = "all_gather"', 'op = "allgather"', 30,
     "tiers[0].collectives[0].op: expected 'all_gather', 'reduce_scatter', 'all_reduce' or 'all_to_all', but found "
     "'allgather'. Write one of these."),
    ('dtype = "bfloat16"', 'dtype = "bf16"', 18,
     "device.matmul[0].dtype: expected a dtype of [device.peak] (bfloat16), but found 'bf16'. Add its peak."),
    # tiers
    ("value = 64, unit", "value = 8, unit", 39,
     "tiers[1].size: expected a larger multiple of the 8 devices of 'node' above it, but found 8. List tiers from the "
     "innermost to the outermost."),
    ("value = 64, unit", "value = 20, unit", 39,
     "tiers[1].size: expected a larger multiple of the 8 devices of 'node' above it, but found 20. List tiers from the "
     "innermost to the outermost."),
    ("value = 64, unit", "value = 64.5, unit", 39,
     "tiers[1].size: expected a whole number of devices, but found 64.5. Correct it."),
    ('name = "fabric"', 'name = "node"', 38,
     "tiers[1].name: expected a new name, but 'node' stands above too. Rename one."),
    ('link = "roce"\nbandwidth = { value = 50,', 'link = "ub"\nbandwidth = { value = 900,', 41,
     "tiers[1].bandwidth: expected at most 1.5 times the 450 GB/s of 'node' inside it, but found 900 GB/s. Check the "
     "units of both; 112.5 GB/s is 900 Gbit/s."),
    ('latency = { value = 5, unit = "us"', 'latency = { value = 500, unit = "ns"', 42,
     "tiers[1].latency: expected at least half the 3 us of 'node' inside it, but found 0.5 us. Check the units of "
     "both; a message to another domain passes the inner links too."),
    ('link = "nvlink"', 'link = "nvswitch"', 26,
     "tiers[0].link: expected one of on-package, nvlink, nvlink-bridge, xgmi, ub, hccs, ici, pcie, infiniband, roce, "
     "efa, ethernet, memory, but found 'nvswitch'. Choose the nearest kind."),
    # fields
    ('[sources]\nhere = "https://example.org/numbers"', "", 6,
     "device.memory.source: expected a URL or a key of [sources] (nothing), but found 'here'. Add it under [sources]."),
    ('here = "https://example.org/numbers"', 'here = "a colleague"', 4,
     "sources.here: expected a URL, but found 'a colleague'. Name the page the numbers stand on."),
    ("memory_bandwidth =", "memory_bandwith =", 5,
     "device.memory_bandwidth: expected this field, but it is missing. Add memory_bandwidth = …."),
    ("launch = { value = 4, unit", "launch = { value = 4, units", 13,
     "launch.unit: expected this field, but it is missing. Every number is a table"),
    ('link = "roce"', 'links = "roce"', 37, "tiers[1].link: expected this field, but it is missing. Add link = …."),
    ('latency = { value = 5, unit = "us", kind = "measured", source = "here" }', "latency = 5e-6", 42,
     'tiers[1].latency: expected a table { value = …, unit = "…", kind = "…", source = "…" }, but found 5e-06. Every '
     "number states its unit and its source."),
    ('kind = "fitted"', 'kind = "guessed"', 9,
     "device.memory_efficiency.kind: expected 'measured', 'published', 'specification' or 'fitted', but found "
     "'guessed'."),
    ("hpsearch.cluster/1", "hpsearch.cluster/9", 1,
     "schema_version: expected 'hpsearch.cluster/1', but found 'hpsearch.cluster/9'. Write one of these."),
    ("[[tiers]]", "[[tier]]", 1,
     "tiers: expected this field, but it is missing. Describe each level of links, inner first, as a [[tiers]] table."),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "message"), BROKEN, ids=[f"{b[2]}-{b[3][:40]}" for b in BROKEN])
def test_a_broken_file_is_refused_with_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1) if new != "[[tier]]" else GOOD.replace("tiers", "tier")
    with pytest.raises(ClusterError) as caught:
        read(text, "my.toml")
    assert str(caught.value).startswith(f"my.toml, line {line}, "), str(caught.value)
    assert message in str(caught.value)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    for name in (path, str(path), tmp_path):
        cluster = Cluster.load(name, devices=16)
        assert (cluster.name, cluster.devices, cluster.tiers[1].bytes_per_s) == ("small", 16, 50e9)


def test_units_of_one_size_are_one_cluster() -> None:
    """https://github.com/aliyun/SimAI/issues/34: 400 Gbit/s and 50 GB/s are the same link."""
    other = GOOD.replace('value = 50, unit = "GB/s"', 'value = 400, unit = "Gbps"')
    assert read(other, "a").tiers == read(GOOD, "b").tiers


def test_bus_and_algorithm_bandwidth_are_told_apart() -> None:
    """https://github.com/NVIDIA/nccl-tests/issues/159: 1 GB over 8 ranks at bus 100 is algorithm 57.1 GB/s, 17.5 ms."""

    def seconds(field: str, rate: float) -> float:
        text = GOOD.replace("all_gather", "all_reduce").replace("1048576", "1000000000")
        old = 'time = { values = [10, 17], unit = "us"'
        assert old in text
        tiers = read(text.replace(old, f'{field} = {{ values = [1.0, {rate}], unit = "GB/s"'), "x").tiers
        return tiers[0].curves[0].seconds[-1]

    assert seconds("busbw", 100) == pytest.approx(17.5e-3)
    assert seconds("algbw", 57.142857) == pytest.approx(17.5e-3)
    assert seconds("busbw", 57.142857) == pytest.approx(30.6e-3, rel=1e-3)


def test_one_of_time_busbw_algbw() -> None:
    both = GOOD.replace("[10, 17]", "[10, 17]") + '[[tiers.collectives]]\nop = "all_gather"\ngroup = 8\nnbytes = [8]\n'
    with pytest.raises(
        ClusterError, match=r"line 43, tiers\[1\].collectives\[0\]: expected one of time, busbw, algbw, but"
    ):
        read(both, "x")


def test_bad_toml_names_its_line() -> None:
    with pytest.raises(ClusterError, match=r"^my\.toml: expected TOML, but .*line 7"):
        read(GOOD.replace('unit = "GB", kind', "unit = GB, kind", 1), "my.toml")


def test_several_mistakes_are_counted() -> None:
    text = GOOD.replace("value = 450,", "value = -450,").replace("value = 80,", "value = -80,")
    with pytest.raises(ClusterError, match=r"line 7, device\.memory: .*\(1 more after this one\.\)$"):
        read(text, "x")


def test_every_path_has_the_line_it_stands_on() -> None:
    lines, content = line_of_paths(GOOD), GOOD.splitlines()
    assert content[line_of(lines, ("tiers", 1, "bandwidth", "unit")) - 1].startswith("bandwidth = { value = 50,")
    assert content[line_of(lines, ("device", "matmul", 0, "m", 1)) - 1].startswith("m = [")
    assert content[line_of(lines, ("tiers", 0, "collectives", 0, "nbytes", 1)) - 1] == "nbytes = ["
    for file in sorted(cost_models().glob("*/cluster.toml")):
        text = file.read_text()
        lines = line_of_paths(text)
        for path in _paths(tomllib.loads(text)):
            line = text.splitlines()[line_of(lines, path) - 1]
            named = [part for part in path if isinstance(part, str)]
            assert any(part in line for part in named), (path, line)


def _paths(value: object, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for key, inner in items for p in _paths(inner, (*at, key)))][0 if at else 1 :]


@pytest.mark.parametrize("name", sorted(set(shipped()) - {"local"}))
def test_shipped_files_are_whole_and_read_back_as_written(name: str) -> None:
    text = (cost_models() / name / "cluster.toml").read_text()
    entry = parse(text, name)
    assert parse(write(entry), "written") == entry
    assert entry.name == name
    assert entry.summary
    described = read(text, name)
    assert all(f.kind in ("measured", "published", "specification", "fitted") for f in described.facts)
    assert set(entry.sources) == {key for key in entry.sources if f'source = "{key}"' in text}, "a source nobody cites"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load("h100-sxm", devices=8)
    assert str(caught.value) == (
        f"cluster 'h100-sxm': expected a path or one of {', '.join(shipped())}, but found neither. "
        "Did you mean 'h100-sxm-ib400'?"
    )
    with pytest.raises(ClusterError, match=r"cluster \./none\.toml: expected a file or a folder with cluster\.toml"):
        Cluster.load("./none.toml", devices=8)


def test_a_folder_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a shipped cluster has its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "h100-sxm-ib400", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "cluster.toml").write_text("")
    assert find("mine", 8) == Path("mine/cluster.toml")
    assert find("h100-sxm-ib400", 8) == cost_models() / "h100-sxm-ib400" / "cluster.toml"
    with pytest.raises(ClusterError, match=r"cluster empty: expected a file or a folder with cluster\.toml"):
        find("empty", 8)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "expected at least 1 device, but got 0. Ask for 1 to 24576."),
        (-8, "expected at least 1 device, but got -8. Ask for 1 to 24576."),
        (12, "expected up to 8 devices (one node) or whole nodes of 8, but got 12. The nearest counts are 8 or 16."),
        (24577, "expected at most 24576 devices in its fabric, but got 24577. Ask for 24576 or fewer, or describe"),
    ],
)
def test_device_counts_that_do_not_fit(devices: int, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load("h100-sxm-roce400", devices=devices)
    assert message in str(caught.value)


@pytest.mark.parametrize("devices", [1, 2, 3, 7, 8, 16, 24576])
def test_device_counts_that_fit(devices: int) -> None:
    assert Cluster.load("h100-sxm-roce400", devices=devices).devices == devices


def test_digest_follows_content_and_not_wording() -> None:
    def digest(text: str, devices: int = 8) -> str:
        found = read(text, "x")
        return Cluster(found.name, devices, found.device, found.tiers, found.summary, found.facts).digest

    assert len(digest(GOOD)) == 64
    assert digest(GOOD) == digest(GOOD.replace("example.org/numbers", "example.org/other")) == digest("# note\n" + GOOD)
    assert (
        len({digest(GOOD), digest(GOOD, 16), digest(GOOD.replace("450", "451")), digest(GOOD.replace("17]", "18]"))})
        == 4
    )


def test_local_is_read_only_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_CACHE", str(tmp_path))
    with pytest.raises(ClusterError, match=r"expected this machine measured with 4 ranks, but found no measurement in"):
        Cluster.load("local", devices=4)
    path = local_file(4)
    path.parent.mkdir(parents=True)
    text = seal(GOOD)
    path.write_text(text)
    assert Cluster.load("local", devices=4).name == "small"
    for cut in range(0, len(text) - 1, 97):
        path.write_text(text[:cut])
        assert not is_whole(path)
        with pytest.raises(ClusterError, match="a damaged measurement"):
            Cluster.load("local", devices=4)
    path.write_text(text.replace("450", "451"))
    with pytest.raises(ClusterError, match="a damaged measurement"):
        Cluster.load("local", devices=4)
    assert local_file(4) != local_file(2)


EXPECTED = {
    "a100-sxm-40gb": ["node", "fabric"],
    "a100-sxm-selene": ["node", "fabric"],
    "a800-sxm": ["node"],
    "ascend-910b": ["node", "fabric"],
    "atlas-800-a3": ["package", "node", "supernode", "fabric"],
    "b200-hgx-efa400": ["node", "fabric"],
    "b200-hgx-ib400": ["node", "fabric"],
    "b300-hgx-ib800": ["node", "fabric"],
    "gb200-nvl72": ["node", "rack", "fabric"],
    "gb300-nvl72": ["node", "rack", "fabric"],
    "h100-sxm-ib400": ["node", "fabric"],
    "h100-sxm-roce400": ["node", "fabric"],
    "h200-sxm-ib400": ["node", "fabric"],
    "h800-sxm-ib400": ["node", "fabric"],
    "mi300x-ib400": ["node", "fabric"],
    "mi325x": ["node"],
    "v100-sxm": ["node"],
}


def test_what_ships_and_its_tiers() -> None:
    assert set(shipped()) - {"local"} == set(EXPECTED)
    for name, tiers in EXPECTED.items():
        assert [tier.name for tier in Cluster.load(name, devices=8).tiers] == tiers


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_digests_are_stable(name: str) -> None:
    """Loaded twice, and read back from what `write` makes of it, a cluster is the same; another device count is not."""
    text = (cost_models() / name / "cluster.toml").read_text()
    again = read(write(parse(text, name)), name)
    one = Cluster.load(name, devices=8)
    assert one.digest == Cluster.load(name, devices=8).digest
    assert one.digest == Cluster(name, 8, again.device, one.tiers).digest
    assert read(text, name).tiers == again.tiers
    assert one.digest != Cluster.load(name, devices=4).digest


def test_one_device_is_the_same_everywhere() -> None:
    devices = [Cluster.load(name, devices=8).device for name in EXPECTED]
    assert len({device.name for device in devices}) == len(set(devices)) < len(EXPECTED)


def test_digests_differ() -> None:
    assert len({Cluster.load(name, devices=8).digest for name in EXPECTED}) == len(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_of_a_shipped_file_has_its_page(name: str) -> None:
    """One fact for each `value` and `values` of the file, each with a URL; no modelled table is called measured."""
    text = (cost_models() / name / "cluster.toml").read_text()
    found = read(text, name).facts
    assert len(found) == text.count("{ value = ") + text.count("{ values = ")
    assert all(fact.source.startswith("https://") for fact in found)
    if "specification)" in read(text, name).summary:
        assert not [f for f in found if f.kind == "measured" and f.path.startswith("device.matmul ")]


def test_what_no_source_states_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"device V100-SXM3-32GB: expected a peak for bfloat16, but only float16"):
        Cluster.load("v100-sxm", devices=8).matmul_s(8, 8, 8, "bfloat16")
    for name in ("v100-sxm", "mi300x-ib400", "mi325x"):
        with pytest.raises(ClusterError, match="the share of peak that attention reaches, but no source states it"):
            Cluster.load(name, devices=8).attention_s(1e9, 1e6, "float16")
    with pytest.raises(ClusterError, match="expected at most 8 devices in its node, but got 16"):
        Cluster.load("mi325x", devices=16)
