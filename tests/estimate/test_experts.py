"""Costs of expert layers beside their products, and of parameters gathered for them, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import Efficiency
from hpsearch.estimate import ModelShape, ParallelLayout, price
from hpsearch.estimate.experts import expert_stalls, quantised_bytes
from hpsearch.estimate.price import EP, HOST, KINDS, ROUTED, STALL, host_share
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.work import moe

SHAPE = ModelShape("E", 2048, 16, 16, 128, 32768, transformer(4, 0, 64), experts=64, top_k=4, moe_ffn=1024)
LAYOUT = ParallelLayout(devices=8, seq_len=2048, micro_batch=1, global_batch=8, ep=8)
CAPTURED = replace(LAYOUT, graphed=frozenset({"all"}))


def step(layout: ParallelLayout, shape: ModelShape = SHAPE) -> float:
    return price(shape, layout, Cluster.load("h100-sxm-ib400", devices=layout.devices)).step(Efficiency())[0]


def test_more_local_experts_stall_longer() -> None:
    """One product each for two linears; backward two: the slope in experts doubles. Eight more add 8·2·0.046."""
    few, many = expert_stalls(LAYOUT, 8), expert_stalls(LAYOUT, 16)
    assert many[0] - few[0] == pytest.approx(8 * 2 * 0.046)
    assert many[1] - few[1] == pytest.approx(2 * (many[0] - few[0]))


def test_narrow_formats_launch_more() -> None:
    """fp8: quantised inputs too; block scales: two operands to rearrange for every product."""
    forward = [expert_stalls(replace(LAYOUT, precision=p), 8)[0] for p in ("bf16", "fp8", "mxfp8")]
    launches = [(x - 5.0) / (2 * 8 * 0.046) for x in forward]
    assert launches == pytest.approx([1, 2, 4])


def test_a_captured_step_waits_for_nobody() -> None:
    assert expert_stalls(CAPTURED, 64) == (0.0, 0.0)
    chunk = price(SHAPE, CAPTURED, Cluster.load("h100-sxm-ib400", devices=8)).chunks[0][0]
    assert chunk.forward[STALL] == 0
    assert chunk.forward[HOST] == pytest.approx(
        0.05 * price(SHAPE, LAYOUT, Cluster.load("h100-sxm-ib400", devices=8)).chunks[0][0].forward[HOST]
    )


@pytest.mark.parametrize(("graphed", "share"), [((), 1.0), (("router",), 0.5), (("moe",), 0.05), (("attention",), 1.0)])
def test_what_of_an_expert_block_the_host_still_issues(graphed: tuple[str, ...], share: float) -> None:
    assert host_share("moe", replace(LAYOUT, graphed=frozenset(graphed))) == share


def test_bytes_of_a_routed_token() -> None:
    """16 bytes each way to arrange an element of the hidden side, 6 where the step is captured; fp8 adds 16 for both
    linears' inputs forward. 2048 tokens to 4 experts."""
    routed = 2048 * 4
    assert moe(SHAPE, LAYOUT).routed_forward - moe(SHAPE, CAPTURED).routed_forward == (16 - 6) * routed * 2048
    more = moe(SHAPE, replace(LAYOUT, precision="fp8")).routed_forward - moe(SHAPE, LAYOUT).routed_forward
    assert more == 16 * routed * (2048 + 1024)
    assert quantised_bytes(LAYOUT) == 0


def test_full_sharding_moves_experts_too() -> None:
    """64 devices, ep 8: every expert is cut over 8 ranks; dense parameters over 64."""
    layout = ParallelLayout(devices=64, seq_len=2048, micro_batch=1, global_batch=64, ep=8, zero=3, fsdp=True)
    cluster = Cluster.load("h100-sxm-ib400", devices=64)
    gather = price(SHAPE, layout, cluster).chunks[0][1]
    experts = cluster.collective("all_gather", 2 * moe(SHAPE, layout).expert_params, 8, 8).seconds
    assert gather > 4 * experts > 0.5 * gather


def test_hybrid_sharding_adds_a_reduction_over_copies() -> None:
    layout = ParallelLayout(devices=64, seq_len=2048, micro_batch=1, global_batch=64, zero=3, fsdp=True, shard_ranks=8)
    dense = replace(SHAPE, pattern=transformer(4, 0, 0), ffn=8192)
    cluster = Cluster.load("h100-sxm-ib400", devices=64)
    (_, gather, both), *_ = price(dense, layout, cluster).chunks
    one = price(
        dense, replace(layout, devices=8, global_batch=8, shard_ranks=0), Cluster.load("h100-sxm-ib400", devices=8)
    )
    assert gather == pytest.approx(one.chunks[0][1])
    assert both > one.chunks[0][2]


def test_gathers_that_are_waited_for_are_slower() -> None:
    layout = ParallelLayout(devices=64, seq_len=2048, micro_batch=1, global_batch=64, ep=8, zero=3, fsdp=True)
    assert step(replace(layout, prefetch=False)) > 2 * step(layout)


def test_recomputed_attention_leaves_experts_alone() -> None:
    layout = replace(LAYOUT, recompute="selective", recompute_parts=frozenset({"attention"}))
    repeat = price(SHAPE, layout, Cluster.load("h100-sxm-ib400", devices=8)).chunks[0][0].repeat
    assert repeat[ROUTED] == repeat[EP] == 0
    assert len(repeat) == len(KINDS)
