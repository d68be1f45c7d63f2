"""Published times of collectives and of expert dispatch between nodes, with their sources: what composed prices are
held to. No number of any cluster file is fitted to them, except where said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpsearch.cluster import Cluster, Routing
from hpsearch.cluster.curve import bus_factor
from hpsearch.cluster.dispatch import parts_met

MIB = 2**20
NETWORK = "https://github.com/stas00/ml-engineering/blob/master/network/README.md"
DEEPEP = "https://github.com/deepseek-ai/DeepEP"
CLOUDMATRIX = "https://arxiv.org/abs/2506.12708"


@dataclass(frozen=True)
class Figure:
    """Seconds of one call that was measured, beside the price of the way that was measured."""

    what: str
    detail: str
    source: str
    measured_s: float
    priced_s: float
    how: str

    @property
    def error(self) -> float:
        """Price ÷ measurement - 1."""
        return self.priced_s / self.measured_s - 1


# 512 B200, NCCL 2.29.7, one NDR400 HCA a GPU: "NCCL 64-node B200 benchmark report", 2026-04-16, 1 MiB to 8 GiB. One
# cluster's data; runs a week apart differ by up to 21 %. CollNet (switches of the network that add up) is left out: no
# cluster here states such switches.
B200_SIZES = [MIB * 2**i for i in range(14)]
B200_GATHER_US = [
    1107.6, 1262.1, 3426.1, 2379.9, 3243.6, 3258.3, 4503.3, 4696.3, 5030.5, 6325.7, 7567.6, 10301, 19979, 31145,
]  # fmt: skip
B200_SCATTER_US = [
    1123.4, 1252.0, 3406.1, 2353.9, 3134.6, 3271.9, 4507.6, 4691.6, 5067.8, 6293.3, 7643.8, 10226, 20086, 29897,
]  # fmt: skip
B200_REDUCE_RING_US = [
    2169.8, 2497.8, 7005.7, 4830.9, 6691.9, 6679.7, 9012.5, 9421.4, 10109, 12721, 15017, 20830, 31945, 61281,
]  # fmt: skip
B200_REDUCE_NVLS_US = [
    265.8, 309.3, 397.0, 571.2, 629.4, 1219.3, 1325.3, 1821.7, 2871.0, 4976.5, 9032.1, 17219, 37782, 84822,
]  # fmt: skip
# 32 B200 on 8 x 400G EFA, all_reduce, GB/s of bus bandwidth from 32 KiB (NETWORK). The first three are so small and so
# coarsely printed (0.01) that they say little: times of 6.3, 3.2 and 0.6 ms, falling as bytes grow.
EFA_BUS = [
    0.01, 0.04, 0.45, 1.33, 2.84, 5.37, 10.38, 18.9, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.9, 361.99, 372.42,
    377.34, 380.39, 381.8,
]  # fmt: skip
EFA_SIZES = [MIB // 32 * 2**i for i in range(20)]
"""Sizes that the bus bandwidths above belong to."""


def all_reduces() -> list[Figure]:
    """Every published all_reduce between nodes, by the algorithm that was measured where the report says which."""
    found = []
    wide = Cluster.load("b200-hgx-ib400", devices=512)
    for name, way, times in (("ring", " ring)", B200_REDUCE_RING_US), ("NVLS", "(switch tree)", B200_REDUCE_NVLS_US)):
        for nbytes, us in zip(B200_SIZES, times, strict=True):
            priced = next(p for p in wide.ways("all_reduce", nbytes, 512, 1) if p.how.endswith(way))
            found.append(
                Figure(f"512 B200, all_reduce {name}", size(nbytes), "NCCL 64-node B200 benchmark report, 2026-04-16",
                       us * 1e-6, priced.seconds, priced.how)
            )  # fmt: skip
    for nbytes, bus in zip(EFA_SIZES, EFA_BUS, strict=True):
        found.append(_of_bus("32 B200 over EFA", without_curves("b200-hgx-efa400", 32), nbytes, 32, bus, NETWORK))
    found.append(
        _of_bus("256 H100", Cluster.load("h100-sxm-ib400", devices=256), 2**31, 256, 340,
                "https://github.com/NVIDIA/nccl/issues/1218")
    )  # fmt: skip
    a100 = Cluster.load("a100-sxm-40gb", devices=256)
    for nbytes in (8, 128):
        priced = a100.collective("all_reduce", nbytes, 256, 1)
        found.append(
            Figure("256 A100, all_reduce", f"{nbytes} B", "https://github.com/NVIDIA/nccl/issues/652", 63e-6,
                   priced.seconds, priced.how)
        )  # fmt: skip
    found.append(
        _of_bus("8 GB200, two trays", Cluster.load("gb200-nvl72", devices=72), 2**33, 8, 811,
                "https://www.lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test")
    )  # fmt: skip
    return found


def _of_bus(what: str, cluster: Cluster, nbytes: int, ranks: int, bus_gb_s: float, source: str) -> Figure:
    priced = cluster.collective("all_reduce", nbytes, ranks, 1)
    seconds = bus_factor("all_reduce", ranks) * nbytes / (bus_gb_s * 1e9)
    return Figure(f"{what}, all_reduce", size(nbytes), source, seconds, priced.seconds, priced.how)


def without_curves(name: str, devices: int) -> Cluster:
    """The cluster without what was measured between its nodes: only tables of one node and the data of links."""
    cluster = Cluster.load(name, devices=devices)
    node, fabric = cluster.tiers
    return replace(cluster, tiers=(node, replace(fabric, curves=())))


def size(nbytes: int) -> str:
    return f"{nbytes / 2**30:g} GiB" if nbytes >= 2**30 else f"{nbytes / MIB:g} MiB"


HIDDEN = 7168
"""Of the model in all figures of dispatch (DeepSeek-V3: top 8 of 256 experts); fp8 there, bf16 back."""

# GB/s of dispatch and combine: bytes of one copy a destination node (a destination rank inside one node), those that
# stay included, by seconds. V1: H800, 4,096 tokens a rank, at most 4 nodes a token. V2: 8,192 tokens.
V1_GB_S = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
V2_GB_S = {
    ("h100-sxm-ib400", 16): (90, 81), ("h100-sxm-ib400", 32): (61, 61), ("b200-hgx-ib400", 16): (90, 91),
    ("b200-hgx-ib400", 8): (726, 740),
}  # fmt: skip
# Microseconds of the kernels that send each copy on its own: H800, 128 tokens a rank.
V1_LOW_LATENCY_US = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
# Microseconds on CloudMatrix384, 128 tokens a rank: 71 GB/s in 116 us are 8.2 MB (int8), 131 in 118 are 15.4 MB.
CLOUDMATRIX_US = {8: (116, 118), 256: (152, 149)}


def dispatches() -> list[Figure]:
    """Every published time of dispatch and combine, by the way that was measured."""
    found = []
    for ranks, rates in V1_GB_S.items():
        found += _logical("DeepEP V1, H800", "h800-sxm-ib400", ranks, 4096, rates, most_nodes=4)
    for (name, ranks), rates in V2_GB_S.items():
        found += _logical(f"DeepEP V2, {name[:4].upper()}", name, ranks, 8192, rates, most_nodes=None)
    for ranks, times in V1_LOW_LATENCY_US.items():
        for phase, token_bytes, us in zip(
            ("dispatch", "combine"), (HIDDEN * (1 + 4 / 128), 2 * HIDDEN), times, strict=True
        ):
            routing = Routing(128, token_bytes, 8, 256)
            found.append(
                _timed(f"DeepEP V1 low latency, H800, {phase}", "h800-sxm-ib400", ranks, routing, "own", us, DEEPEP)
            )
    for ranks, times in CLOUDMATRIX_US.items():
        for phase, total, us in zip(("dispatch", "combine"), (8.2e6, 15.4e6), times, strict=True):
            routing = Routing(128, total / 128 / 8, 8, 256)
            found.append(_timed(f"CloudMatrix384, {phase}", "atlas-800-a3", ranks, routing, "own", us, CLOUDMATRIX))
    return found


def _logical(
    what: str, name: str, ranks: int, tokens: int, rates: tuple[float, float], most_nodes: int | None
) -> list[Figure]:
    found = []
    nodes = ranks // 8
    limit = min(nodes, most_nodes or nodes)
    copies = parts_met(8, 256, 8) if nodes == 1 else parts_met(limit, 256 * limit // nodes, 8)
    for phase, token_bytes, rate in zip(("dispatch", "combine"), (HIDDEN, 2 * HIDDEN), rates, strict=True):
        routing = Routing(tokens, token_bytes, 8, 256, limit if nodes > 1 else None)
        us = tokens * token_bytes * copies / rate / 1e3
        found.append(_timed(f"{what}, {phase}", name, ranks, routing, "domain", us, DEEPEP))
    return found


def _timed(what: str, name: str, ranks: int, routing: Routing, way: str, us: float, source: str) -> Figure:
    prices = Cluster.load(name, devices=max(ranks, 8)).dispatch(routing, ranks, 1)
    priced = next(p for p in prices if p.how.endswith(f"{way})"))
    return Figure(what, f"{ranks} ranks", source, us * 1e-6, priced.seconds, priced.how)
