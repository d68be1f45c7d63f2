"""Figures of other tools: nccl-tests, worked out by hand, and traces of torch.profiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpsearch.cluster import Cluster
from hpsearch.errors import ClusterError
from hpsearch.measure.imported import put_into, sources_of
from hpsearch.measure.nccl_tests import hosts_of, read_nccl_tests
from hpsearch.measure.trace import read_trace

HEAD = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20\n#\n# Using devices\n"
)
COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def ranks(count: int, per_host: int = 8) -> str:
    return "".join(
        f"#  Rank {r:2} Group  0 Pid   1887 on worker-{r // per_host} device {r % per_host:2} [0x8d] NVIDIA H100\n"
        for r in range(count)
    )


def output(test: str, count: int, rows: list[str]) -> str:
    return (
        f"$ mpirun -np {count} ./build/{test} -b 8 -e 128M -f 2 -g 1\n"
        + HEAD
        + ranks(count)
        + COLUMNS
        + "\n".join(rows)
    )


ALL_REDUCE = [
    "           0             0  float  sum  -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0",
    "        1024           256  float  sum  -1    20.48    0.05    0.09      0    20.00    0.05    0.09      0",
    "     1048576        262144  float  sum  -1   100.00   10.49   18.35      0    80.00   13.11   22.94      0",
    "   134217728      33554432  float  sum  -1   1000.0  134.22  234.88      0   1000.0  134.22  234.88      0",
]
"""128 MiB in 1 ms over 8 ranks: algbw 134.2 GB/s, and each rank sends 2 · 7/8 of it: busbw 234.9."""
ALL_GATHER = [
    "     1048576         32768  float  none  -1   100.00   10.49    9.18      0    80.00   13.11   11.47    N/A"
]
"""1 MiB gathered over 8 ranks: each rank sends 7/8 of it once."""


def test_all_reduce_by_hand() -> None:
    curve = read_nccl_tests(output("all_reduce_perf", 8, ALL_REDUCE), "x.txt")
    assert (curve.kind, curve.size, curve.stride) == ("all_reduce", 8, 1)
    assert curve.nbytes == (1024, 1048576, 134217728)
    assert curve.seconds == pytest.approx((20.48e-6, 100e-6, 1e-3))
    in_place = read_nccl_tests(output("all_reduce_perf", 8, ALL_REDUCE), "x.txt", in_place=True)
    assert in_place.seconds == pytest.approx((20e-6, 80e-6, 1e-3))


def test_all_gather_by_hand() -> None:
    curve = read_nccl_tests(output("all_gather_perf", 8, ALL_GATHER), "x.txt")
    assert (curve.kind, curve.nbytes, curve.seconds) == ("all_gather", (1048576,), pytest.approx((100e-6,)))


def test_the_older_form_without_root_and_with_errors() -> None:
    row = "     1048576        262144  float  sum  100.00   10.49   18.35  4e-07    80.00   13.11   22.94  4e-07"
    curve = read_nccl_tests(HEAD + ranks(8) + row, "logs/all_reduce.log")
    assert (curve.kind, curve.seconds) == ("all_reduce", pytest.approx((100e-6,)))


@pytest.mark.parametrize(
    ("test", "kind", "factor"),
    [("reduce_scatter_perf", "reduce_scatter", 15 / 16), ("alltoall_perf", "all_to_all", 15 / 16),
     ("broadcast_perf", "broadcast", 1.0)],
)  # fmt: skip
def test_factors_of_the_other_collectives_over_sixteen_ranks(test: str, kind: str, factor: float) -> None:
    busbw = 41.94 * factor
    row = f"4194304  65536  float  sum  -1  100.00  41.94  {busbw:.2f}  0  100.00  41.94  {busbw:.2f}  0"
    curve = read_nccl_tests(output(test, 16, [row]), "x.txt")
    assert (curve.kind, curve.size, curve.seconds) == (kind, 16, pytest.approx((100e-6,)))


def test_busbw_and_algbw_are_never_confused() -> None:
    """Swapped columns, a wrong count of ranks and another collective all contradict the time."""
    swapped = ALL_REDUCE[3].replace("134.22  234.88", "234.88  134.22")
    with pytest.raises(
        ClusterError, match=r"expected algbw 134\.22 GB/s of 134217728 bytes in 1000 us, but found 234\.88"
    ):
        read_nccl_tests(output("all_reduce_perf", 8, [swapped]), "x.txt")
    with pytest.raises(
        ClusterError, match=r"expected busbw 201\.33 GB/s, 1\.5 times algbw, for all_reduce over 4 ranks, but"
    ):
        read_nccl_tests(output("all_reduce_perf", 4, [ALL_REDUCE[3]]), "x.txt")
    with pytest.raises(ClusterError, match=r"times algbw, for all_gather over 8 ranks, but found 234\.88"):
        read_nccl_tests(output("all_gather_perf", 8, [ALL_REDUCE[3]]), "x.txt")


def test_what_an_output_does_not_say_must_be_said() -> None:
    with pytest.raises(ClusterError, match=r"expected at least two ranks, but found 0 lines"):
        read_nccl_tests("\n".join(ALL_REDUCE), "all_reduce.txt")
    with pytest.raises(ClusterError, match=r"expected the name of the test .* Say it with --collective"):
        read_nccl_tests("\n".join(ALL_REDUCE), "x.txt", ranks=8)
    assert read_nccl_tests("\n".join(ALL_REDUCE), "x.txt", ranks=8, kind="all_reduce").size == 8
    with pytest.raises(ClusterError, match=r"expected a table of nccl-tests"):
        read_nccl_tests("nothing", "all_reduce.txt", ranks=8)


def test_hosts_are_read_from_the_heading() -> None:
    assert hosts_of(ranks(4, per_host=2)) == ("worker-0", "worker-0", "worker-1", "worker-1")


def test_curves_go_into_a_cluster_on_the_tier_they_span(tmp_path: Path) -> None:
    inside, across = tmp_path / "inside.txt", tmp_path / "across.txt"
    inside.write_text(output("all_reduce_perf", 8, ALL_REDUCE))
    row = "   134217728      33554432  float  sum  -1   2000.0   67.11  125.83      0   2000.0   67.11  125.83      0"
    across.write_text(output("all_reduce_perf", 16, [row]))
    folder = tmp_path / "mine"
    put_into(folder, "h100-sxm-ib400", sources_of([inside, across], []))
    cluster = Cluster.load(folder, devices=16)
    assert cluster.name == "mine"
    assert cluster.collective("all_reduce", 134217728, 8, 1).seconds == pytest.approx(1e-3)
    assert cluster.collective("all_reduce", 134217728, 16, 1).seconds == pytest.approx(2e-3)
    before = Cluster.load("h100-sxm-ib400", devices=16)
    assert cluster.collective("all_gather", 2**20, 8, 1) == before.collective("all_gather", 2**20, 8, 1)
    assert "measured by nccl-tests, across.txt" in {fact.source for fact in cluster.facts}


def test_figures_need_a_cluster_to_go_into(tmp_path: Path) -> None:
    (tmp_path / "all_reduce.txt").write_text(output("all_reduce_perf", 8, ALL_REDUCE))
    sources = sources_of([tmp_path / "all_reduce.txt"], [])
    with pytest.raises(ClusterError, match=r"expected cluster\.toml to put these figures into, but found none"):
        put_into(tmp_path, "", sources)
    put_into(tmp_path / "a", "h100-sxm-ib400", sources)
    put_into(tmp_path / "a", "", sources)
    large = replace(sources[0], curves=(replace(sources[0].curves[0], stride=10**6),))
    with pytest.raises(ClusterError, match=r"expected groups inside the"):
        put_into(tmp_path / "a", "", [large])


# Traces


def kernel(name: str, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": dur, "pid": 0, "tid": 7, "args": args}


def nccl(collective: str, dur: float, sent: int, received: int, ranks: str = "[0, 1, 2, 3]") -> dict[str, Any]:
    return kernel(
        "ncclDevKernel_Sum_bf16_RING_LL", dur,
        **{"Collective name": collective, "In msg nelems": sent, "Out msg nelems": received, "Group size": 4,
           "dtype": "BFloat16", "Process Group Ranks": ranks},
    )  # fmt: skip


def product(name: str, dims: list[list[int]], external: int, dtype: str = "c10::BFloat16") -> dict[str, Any]:
    args = {"External id": external, "Input Dims": dims, "Input type": [dtype] * len(dims)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 9.0, "pid": 1, "tid": 1, "args": args}


def trace(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return path


def test_collectives_of_a_trace(tmp_path: Path) -> None:
    """Elements times two bytes; of an all-gather what is received; of calls alike the shortest, the rest is waiting."""
    path = trace(
        tmp_path, nccl("allreduce", 70.0, 1024, 1024), nccl("allreduce", 50.0, 1024, 1024),
        nccl("allreduce", 300.0, 4096, 4096), nccl("_allgather_base", 40.0, 256, 1024),
        nccl("_reduce_scatter_base", 45.0, 1024, 256), nccl("all_to_allv", 30.0, 512, 512, "[0, 4, 8, 12]"),
        nccl("send", 10.0, 512, 512),
    )  # fmt: skip
    curves = {(c.kind, c.size, c.stride): (c.nbytes, c.seconds) for c in read_trace(path).curves}
    assert curves == {
        ("all_reduce", 4, 1): ((2048, 8192), pytest.approx((50e-6, 300e-6))),
        ("all_gather", 4, 1): ((2048,), pytest.approx((40e-6,))),
        ("reduce_scatter", 4, 1): ((2048,), pytest.approx((45e-6,))),
        ("all_to_all", 4, 4): ((1024,), pytest.approx((30e-6,))),
    }


def test_matmuls_of_a_trace_take_as_long_as_their_kernels(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        product("aten::mm", [[128, 64], [64, 256]], 1), kernel("cutlass_gemm", 4.0, **{"External id": 1}),
        product("aten::mm", [[128, 64], [64, 256]], 2), kernel("gemm", 5.0, **{"External id": 2}),
        kernel("splitK_reduce", 1.0, **{"External id": 2}),
        product("aten::addmm", [[256], [512, 64], [64, 256]], 3), kernel("gemm", 8.0, **{"External id": 3}),
        product("aten::mm", [[0, 64], [64, 256]], 4), product("aten::bmm", [[2, 8, 8], [2, 8, 8]], 5),
    )  # fmt: skip
    (table,) = read_trace(path).matmuls
    assert (table.dtype, table.n, table.k, table.m) == ("bfloat16", 256, 64, (128, 512))
    assert table.flops_per_s == pytest.approx((2 * 128 * 256 * 64 / 5e-6, 2 * 512 * 256 * 64 / 8e-6))


def test_a_trace_goes_into_a_cluster(tmp_path: Path) -> None:
    path = trace(
        tmp_path, nccl("allreduce", 50.0, 2**20, 2**20),
        product("aten::mm", [[4096, 512], [512, 3000]], 1), kernel("gemm", 40.0, **{"External id": 1}),
    )  # fmt: skip
    put_into(tmp_path / "mine", "h100-sxm-ib400", sources_of([], [path]))
    cluster = Cluster.load(tmp_path / "mine", devices=8)
    assert cluster.matmul_s(4096, 3000, 512, "bfloat16") == pytest.approx(40e-6, rel=1e-3)
    assert cluster.collective("all_reduce", 2**21, 4, 1).seconds == pytest.approx(50e-6)


def test_a_real_trace_of_this_processor(tmp_path: Path) -> None:
    left, right = torch.ones(64, 128), torch.ones(128, 32)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(3):
            left @ right
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    (table,) = read_trace(path).matmuls
    assert (table.dtype, table.n, table.k, table.m) == ("float32", 32, 128, (64,))
    assert 1e6 < table.flops_per_s[0] < 1e13


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for content, problem in (
        ("no json", "expected a chrome trace"),
        ('{"traceEvents": []}', "expected NCCL kernels or"),
    ):
        path.write_text(content)
        with pytest.raises(ClusterError, match=problem):
            read_trace(path)
