"""Spaces, insides, outsides, cuts and recomputed layers at random, each as legal as the search would have it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from hpsearch.cluster import Cluster
from hpsearch.errors import ClusterError
from hpsearch.estimate import LatentAttention, ModelShape, ParallelLayout
from hpsearch.estimate.shape import Layer, StateSpace
from hpsearch.estimate.stages import filled_sizes
from hpsearch.space import Space
from hpsearch.space.rules import Rules
from hpsearch.space.space import Inside, Row, apart
from tests.space.naive import dealt, places

MACHINES = (
    "h100-sxm-roce400", "h800-sxm-ib400", "a100-sxm-selene", "a100-sxm-40gb", "b200-hgx-ib400", "gb200-nvl72",
    "h200-sxm-ib400", "atlas-800-a3",
)  # fmt: skip


@cache
def machine(name: str, devices: int) -> Cluster:
    return Cluster.load(name, devices=devices)


def a_space(draw: random.Random) -> Space:
    """A model of up to 14 layers on up to 64 devices; every switch of the base on in some."""
    shape = a_shape(draw)
    cluster = None
    while cluster is None:
        try:
            cluster = machine(draw.choice(MACHINES), draw.choice([4, 8, 16, 32, 64, 72]))
        except ClusterError:
            continue
    if draw.random() < 0.3:
        cluster = slow(cluster, draw)
    return Space(shape, cluster, a_base(draw, cluster, shape))


def slow(cluster: Cluster, draw: random.Random) -> Cluster:
    """Links a tenth as fast, and messages a hundred times as late."""
    tiers = tuple(
        replace(one, bytes_per_s=one.bytes_per_s / 10, latency_s=100 * one.latency_s, curves=(), protocols=(),
                switches=None, switch_tree=None)
        for one in cluster.tiers
    )  # fmt: skip
    device = replace(cluster.device, overlap_efficiency=draw.choice([0.0, 0.5, 0.95]))
    return Cluster(cluster.name, cluster.devices, device, tiers)


def a_shape(draw: random.Random) -> ModelShape:
    """Every third has some blocks with sizes of their own."""
    shape = a_plain_shape(draw)
    if draw.random() < 0.67:
        return shape
    own = {
        "mlp#2": replace(shape, ffn=16 * shape.ffn), "moe#2": replace(shape, moe_ffn=4 * shape.moe_ffn, top_k=1),
        "attention#2": replace(shape, heads=2 * shape.heads, kv_heads=2 * shape.kv_heads),
    }  # fmt: skip
    pattern = tuple(
        tuple(f"{name}#2" if f"{name}#2" in own and draw.random() < 0.3 else name for name in layer)
        for layer in shape.pattern
    )
    return replace(shape, pattern=pattern, variants=tuple(own.items()))


def a_plain_shape(draw: random.Random) -> ModelShape:
    heads, head_dim = draw.choice([8, 12, 16, 32]), draw.choice([64, 128])
    experts, layers = draw.choice([4, 8, 12]), draw.randint(2, 14)
    latent = LatentAttention(draw.choice([0, 512]), 256, 64, 64, 64) if draw.random() < 0.2 else None
    return ModelShape(
        "drawn", draw.choice([512, 1024, 2048, 4096]), heads, draw.choice([1, 4, heads]), head_dim,
        draw.choice([0, 1000, 32000, 256000]), a_pattern(draw, layers), ffn=draw.choice([1024, 4096, 16384]),
        gated=draw.random() < 0.7, tied=draw.random() < 0.3, positions=draw.choice([0, 0, 4096]), experts=experts,
        top_k=draw.choice([1, 2, 4]), moe_ffn=draw.choice([256, 1024, 8192]), shared_ffn=draw.choice([0, 1024]),
        mla=latent, mamba=StateSpace(16, 64, 128, 8), mtp_layers=draw.choice([0, 0, 0, 1, 2]),
        bias=draw.random() < 0.3,
    )  # fmt: skip


def a_pattern(draw: random.Random, layers: int) -> tuple[Layer, ...]:
    dense, routed = ("attention", "mlp"), ("attention", "moe")
    kind = draw.choice(["dense", "experts", "dense, then experts", "mixed", "hybrid"])
    if kind == "mixed":
        return tuple(draw.choice([dense, routed]) for _ in range(layers))
    if kind == "hybrid":
        return tuple((draw.choice(["attention", "mlp", "moe", "mamba", "mamba"]),) for _ in range(layers))
    first = {"dense": layers, "experts": 0}.get(kind, layers // 3)
    return (dense,) * first + (routed,) * (layers - first)


def a_base(draw: random.Random, cluster: Cluster, shape: ModelShape) -> ParallelLayout:
    def often(share: float) -> bool:
        return draw.random() < share

    optimizer = draw.choice(["adamw", "adamw", "adamw", "muon", "sgd", "momentum"])
    host = cluster.device.host_bytes_per_s is not None
    return ParallelLayout(
        devices=1, seq_len=draw.choice([512, 2048, 4096, 16384]), micro_batch=1,
        global_batch=draw.choice([3, 8, 24, 64, 256]), overlap_grad_reduce=often(0.5), overlap_param_gather=often(0.5),
        overlap_tp=often(0.2), overlap_ep=often(0.2), dedup=often(0.3), prefetch=often(0.8), flash=often(0.8),
        fused=often(0.8), fused_loss=often(0.8), fused_norm=often(0.8), dropout=often(0.1), expandable=often(0.8),
        grad_bytes=draw.choice([2, 4]), optimizer=optimizer, moment_element_bytes=draw.choice([1, 2, 4]),
        precision=draw.choice(["bf16", "bf16", "fp8"]), lora=often(0.1), loss_kernel=often(0.2), qkv_views=often(0.2),
        trained_parts="layer" if often(0.1) else "step", offload_share=draw.choice([0.3, 1.0]) if host and often(0.2)
        else 0.0,
        graphed=frozenset({"all"}) if often(0.1) else frozenset(),
    )  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    inside: Inside
    row: Row
    layout: ParallelLayout


def candidates(draw: random.Random, space: Space, insides: int, rows: int, cuts: int) -> list[list[Candidate]]:
    """Of some insides, of some outsides of each, some cuts each: one list for each outside."""
    rules = Rules()
    every = list(space.insides(rules))
    found = []
    for inside in draw.sample(every, min(insides, len(every))):
        outsides = [tuple(row) for row in apart(space.outsides(inside, rules)).tolist()]
        piped = [row for row in outsides if row[0] > 1]
        some = draw.sample(outsides, min(rows // 3, len(outsides))) + draw.sample(piped, min(rows, len(piped)))
        for pp, vpp, dp, count, zero, shard_ranks, schedule in some:
            whole = (pp, vpp, dp, count, zero, shard_ranks, schedule)
            found.append([Candidate(inside, whole, one) for one in some_cuts(draw, space, inside, whole, cuts)])
    return found


def some_cuts(draw: random.Random, space: Space, inside: Inside, row: Row, number: int) -> list[ParallelLayout]:
    pp, vpp = row[:2]
    found = []
    for _ in range(number):
        cut = filled_sizes(space.shape, pp * vpp) if vpp > 1 else a_cut(draw, space.shape.layers, pp)
        plain = space.layout(inside, row, cut)
        if inside.recompute != "full":
            found.append(plain)
            continue
        again = [0] * len(cut)
        for rank in range(pp):
            mine = tuple(cut[i] for i in places(plain, rank))
            total = draw.choice([0, sum(mine), draw.randint(0, sum(mine))])
            for i, layers in zip(places(plain, rank), dealt(total, mine), strict=True):
                again[i] = layers
        how = {"recompute": "full", "recomputed": tuple(again)} if any(again) else {"recompute": "none"}
        found.append(replace(plain, **how))
    return list(dict.fromkeys(found))


def a_cut(draw: random.Random, layers: int, parts: int) -> list[int]:
    ends = [0, *sorted(draw.sample(range(1, layers), parts - 1)), layers]
    return [after - before for before, after in pairwise(ends)]
