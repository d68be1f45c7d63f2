"""Clusters of unlike nodes: every layout on every order of the nodes by plain loops, and what an equal split loses.

C9's examples: two nodes of 80 GB beside two of 40 GB, and a node that computes at 0.7 of the rate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest

from hpsearch.cluster import Cluster, Group
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import InfeasibleError
from hpsearch.estimate import ModelShape, ParallelLayout, estimate, price, rank_memory
from hpsearch.estimate.estimate import Priced, assembled, blocks, chunk_params
from hpsearch.estimate.optimizer import traffic_bytes
from hpsearch.estimate.price import Seconds
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import chunks as chunks_of
from hpsearch.estimate.stages import filled_sizes
from hpsearch.estimate.stands import in_words
from hpsearch.estimate.uneven import shares
from hpsearch.estimate.work import Work
from hpsearch.schedule import make_schedule, schedule_s
from hpsearch.space import Space, best
from hpsearch.space.layout_file import layout_file, load, save
from hpsearch.space.prices import Prices
from hpsearch.space.rules import Rules
from hpsearch.space.space import apart
from hpsearch.space.unlike import Unlike
from tests.space.naive import Pins, every_layout, places, step_s

BASE = ParallelLayout(
    devices=1, seq_len=4096, micro_batch=1, global_batch=16, overlap_grad_reduce=True, overlap_param_gather=True,
)  # fmt: skip
DEEP = ModelShape("deep", 4096, 32, 8, 128, 64000, transformer(6, 0, 0), ffn=14336)
EXPERTS = ModelShape(
    "experts", 2048, 16, 4, 128, 64000, transformer(4, 1, 8), ffn=8192, experts=8, top_k=2, moe_ffn=4096
)
WIDE_HEAD = ModelShape("wide head", 4096, 32, 8, 128, 256000, transformer(5, 0, 0), ffn=8192)


def nodes(machine: str, size: int, groups: tuple[Group, ...]) -> Cluster:
    """A machine with nodes of `size` devices."""
    made = Cluster.load(machine, devices=16)
    inner, outer = made.tiers
    devices = sum(group.devices for group in groups)
    tiers = replace(inner, size=size), replace(outer, size=devices)
    return Cluster(made.name, devices, made.device, tiers, groups=groups)


@dataclass(frozen=True)
class Problem:
    shape: ModelShape
    cluster: Cluster
    pins: Pins
    rooms: tuple[float, ...] = (1.0, 0.5, 0.3)
    """Memory of all devices, over what the machine has."""
    base: ParallelLayout = BASE


ONE = {"cp": (1,), "micro_batch": (1,), "vpp": (1,), "cp_kind": ("ring",)}
PROBLEMS = {
    "two kinds of memory": Problem(
        DEEP, nodes("a100-sxm-selene", 2, (Group("80", 4), Group("40", 4, 40 * 10**9, 1.555e12))),
        {**ONE, "recompute": ("full",), "zero": (1,), "pp": (2, 4), "tp": (1, 2), "sp": (True,)},
        (1.0, 0.25, 0.17),
    ),
    "a slow node": Problem(
        DEEP, nodes("h100-sxm-roce400", 1, (Group("full", 3), Group("slow", 1, compute=0.7))),
        {**ONE, "recompute": ("full", "mlp"), "zero": (0, 1)}, (1.0, 0.22, 0.15),
    ),
    "a slow node, a small one": Problem(
        WIDE_HEAD, nodes("h100-sxm-roce400", 2,
                         (Group("slow", 2, compute=0.5), Group("full", 4), Group("small", 2, 15 * 10**9))),
        {**ONE, "recompute": ("full",), "pp": (2, 4), "tp": (1, 2), "zero": (1,), "sp": (True,)}, (1.0, 0.25),
    ),
    "virtual stages": Problem(
        DEEP, nodes("h100-sxm-roce400", 1, (Group("full", 1), Group("slow", 1, compute=0.6, memory_bytes_per_s=1e12))),
        {**ONE, "vpp": (1, 2, 3), "recompute": ("full",), "zero": (0,)}, (1.0, 0.25),
    ),
    "experts": Problem(
        EXPERTS, nodes("h100-sxm-roce400", 2, (Group("full", 2), Group("slow", 2, 30 * 10**9, compute=0.7))),
        {**ONE, "recompute": ("full", "moe"), "zero": (0, 1, 3), "tp": (1, 2)}, (1.0, 0.15),
    ),
}  # fmt: skip
CASES = [(name, room) for name, problem in PROBLEMS.items() for room in problem.rooms]


def stands(cluster: Cluster, layout: ParallelLayout) -> Iterator[tuple[str, ...]]:
    """Every way to put stages on nodes: nodes in every order, each stage on the next of their devices."""
    node = cluster.tiers[0].size
    each = layout.devices // layout.pp
    there = [group.name for group in cluster.groups for _ in range(group.devices // node)]
    found = []
    for order in permutations(there):
        ranks = [name for name in order for _ in range(node)]
        told = (set(ranks[stage * each : (stage + 1) * each]) for stage in range(layout.pp))
        found.append(tuple("+".join(g.name for g in cluster.groups if g.name in names) for names in told))
    return iter(dict.fromkeys(found))


@dataclass(frozen=True)
class Placed:
    layout: ParallelLayout
    step_s: float
    needed: tuple[tuple[tuple[str, ...], float], ...]
    """Groups and peak bytes of each pipeline rank."""

    def fits(self, cluster: Cluster) -> bool:
        return all(peak <= cluster.among(names).device.memory_bytes for names, peak in self.needed)


@cache
def every(name: str) -> tuple[Placed, ...]:
    """Memory does not change what a layout costs, so each is priced once for all rooms."""
    problem = PROBLEMS[name]
    shape, cluster, found = problem.shape, problem.cluster, []
    priced: dict[tuple[object, ...], tuple[dict[str, Work], dict[str, Seconds]]] = {}
    for layout in every_layout(shape, cluster, problem.base, problem.pins):
        inside = (layout.tp, layout.sp, layout.ep, layout.etp, layout.recompute, layout.recompute_parts, layout.fsdp)
        peaks = None
        for told in stands(cluster, layout):
            each = tuple(tuple(one.split("+")) for one in told)
            for names in each:
                if (*inside, names) not in priced:
                    priced[(*inside, names)] = blocks(shape, layout, cluster.among(names))
            ranks = [priced[(*inside, names)] for names in each]
            if peaks is None:
                peaks = [rank_memory(shape, layout, rank, works=ranks[0][0]).peak_bytes for rank in range(layout.pp)]
            made = on_groups(shape, layout, cluster, each, ranks)
            took = step_s(made, efficiency_of(cluster.device.name))
            needed = tuple(zip(each, peaks, strict=True))
            found.append(Placed(replace(layout, stage_groups=told), took, needed))
            found += [Placed(one, seconds, needed) for one, seconds in unevenly(shape, found[-1].layout, cluster, made)]
    return tuple(found)


def unevenly(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, made: Priced
) -> Iterator[tuple[ParallelLayout, float]]:
    """Every number of micro-batches for the data ranks of each group, where one stage spans all of them and they meet
    once a step: the step is over when the last of them is."""
    each = layout.tp * layout.cp
    is_apart = any(group.devices % max(each, layout.ep * layout.etp) for group in cluster.groups)
    if layout.pp > 1 or layout.zero > 1 or is_apart:
        return
    ranks, rates = [group.devices // each for group in cluster.groups], efficiency_of(cluster.device.name)
    plain = replace(layout, stage_groups=())
    alone = [price(shape, plain, cluster.among((group.name,))).chunk_seconds(rates) for group in cluster.groups]
    for counts in product(range(1, 2 * layout.micro_batches + 1), repeat=len(ranks)):
        most, rows = max(counts), sum(a * b for a, b in zip(ranks, counts, strict=True)) * layout.micro_batch
        if len(set(counts)) == 1 or not layout.global_batch <= rows < layout.global_batch + sum(ranks):
            continue
        last = max(range(len(ranks)), key=lambda i: counts[i] * float((alone[i][0] + alone[i][1]).sum()))
        forward, backward = (part * (counts[last] / most) for part in alone[last])
        uneven = replace(
            layout, global_batch=most * layout.dp * layout.micro_batch, uneven=tuple(zip(ranks, counts, strict=True))
        )
        yield uneven, made.around(most * float((forward + backward).sum()), forward, backward, rates)[0]


def on_groups(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, each: tuple[tuple[str, ...], ...],
    ranks: list[tuple[dict[str, Work], dict[str, Seconds]]],
) -> Priced:  # fmt: skip
    """Each rank's chunks as on a cluster of its devices alone; once a step, the slowest rank."""
    alone = [
        assembled(shape, layout, cluster.among(names), works, seconds)
        for names, (works, seconds) in zip(each, ranks, strict=True)
    ]
    held = {i: rank for rank in range(layout.pp) for i in places(layout, rank)}
    chunks = tuple(alone[held[i]].chunks[i] for i in range(layout.chunks))
    works = ranks[0][0]
    once = max((of_rank(shape, layout, cluster.among(g), rank, works) for rank, g in enumerate(each)), key=sum)
    return replace(alone[0], chunks=chunks, reduce_s=once[0], gather_s=once[1], optimizer_s=once[2])


def of_rank(
    shape: ModelShape, layout: ParallelLayout, cluster: Cluster, rank: int, works: dict[str, Work]
) -> tuple[float, float, float]:
    """Reduction, gather and update of one rank: AdamW with fp32 gradients reads 16 and writes 14 bytes a parameter."""
    cut = [chunks_of(shape, layout)[i] for i in places(layout, rank)]
    sums = [sum(one) for one in zip(*(chunk_params(shape, layout, chunk, works) for chunk in cut), strict=True)]
    reduce = gather = held = 0.0
    for params, count, stride in zip(
        sums, (layout.data_ranks, layout.expert_data_ranks), (layout.tp, layout.ep * layout.etp), strict=True
    ):
        shards = min(count, layout.shards) if layout.zero else 1
        held += params / shards
        if count > 1 and params and not layout.fsdp:
            if layout.zero:
                reduce += cluster.collective("reduce_scatter", 4 * params, count, stride).seconds
                gather += cluster.collective("all_gather", 2 * params, count, stride).seconds
            else:
                reduce += cluster.collective("all_reduce", 4 * params, count, stride).seconds
    device = cluster.device
    return reduce, gather, traffic_bytes(layout) * held / (device.memory_bytes_per_s * device.memory_efficiency)


def limited(name: str, room: float) -> tuple[Space, list[Placed]]:
    """The space where every device has this share of its memory, and the layouts that fit."""
    problem = PROBLEMS[name]
    whole = problem.cluster
    groups = tuple(
        replace(group, memory_bytes=None if group.memory_bytes is None else int(room * group.memory_bytes))
        for group in whole.groups
    )
    device = replace(whole.device, memory_bytes=int(room * whole.device.memory_bytes))
    cluster = replace(whole, device=device, groups=groups)
    return Space(problem.shape, cluster, problem.base, problem.pins), [one for one in every(name) if one.fits(cluster)]


@pytest.mark.parametrize(("name", "room"), CASES)
def test_nothing_is_better_than_the_certificate_says(name: str, room: float) -> None:
    space, fitting = limited(name, room)
    if not fitting:
        with pytest.raises(InfeasibleError):
            best(space)
        return
    found = best(space)
    least = min(one.step_s for one in fitting)
    assert found.certificate.bound_s <= least * (1 + 1e-9)
    assert found.best.step_s == pytest.approx(least, rel=1e-9)
    known = {one.layout: one.step_s for one in fitting}
    for choice in found.tried:
        assert choice.step_s == pytest.approx(known[choice.layout], rel=1e-9)


def test_a_slow_node_takes_fewer_micro_batches(tmp_path: Path) -> None:
    """Three of four devices as fast, one at 0.7, compute-bound: about 13, 13, 13 and 9 of 48; with all alike none."""
    cluster = nodes("h100-sxm-roce400", 1, (Group("full", 3), Group("slow", 1, compute=0.7)))
    pins: Pins = {"pp": (1,), "tp": (1,), "cp": (1,), "micro_batch": (1,), "zero": (1,), "recompute": ("full",)}
    space = Space(DEEP, cluster, replace(BASE, global_batch=48), pins)
    found = best(space)
    layout = found.best.layout
    save(layout_file(space, found), tmp_path / "layout.json")
    assert load(tmp_path / "layout.json").read() == layout
    assert layout.uneven in (((3, 13), (1, 9)), ((3, 13), (1, 10)))
    assert 48 <= layout.rows < 48 + 4
    alike = replace(cluster, groups=(Group("one", 3), Group("other", 1)))
    assert best(replace(space, cluster=alike)).best.layout.uneven == ()


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_the_best_there_are(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice([1, 2, 3])
    seconds = [draw.choice([1.0, 1.3, draw.uniform(0.5, 4.0)]) for _ in range(count)]
    ranks, wanted = [draw.randint(1, 4) for _ in range(count)], draw.randint(1, 20)
    found = shares(seconds, ranks, wanted)
    held = sum(a * b for a, b in zip(found, ranks, strict=True))
    every_way = (
        max(a * b for a, b in zip(one, seconds, strict=True))
        for one in product(range(1, 21), repeat=count)
        if sum(a * b for a, b in zip(one, ranks, strict=True)) >= wanted
    )
    assert held >= wanted
    assert min(found) >= 1
    assert max(a * b for a, b in zip(found, seconds, strict=True)) == pytest.approx(min(every_way))


def test_the_file_says_where_stages_stand(tmp_path: Path) -> None:
    space, _ = limited("a slow node", 1.0)
    found = best(replace(space, pins={**space.pins, "pp": (4,)}))
    save(layout_file(space, found), tmp_path / "layout.json")
    layout = load(tmp_path / "layout.json").read()
    assert layout == found.best.layout
    assert sorted(layout.stage_groups) == ["full", "full", "full", "slow"]


@pytest.mark.parametrize(("name", "room"), CASES)
def test_no_bound_of_an_arrangement_is_above_a_layout_that_stands_so(name: str, room: float) -> None:
    space, fitting = limited(name, room)
    least: dict[tuple[object, ...], float] = {}
    for one in fitting:
        key = kind_of(one.layout)
        least[key] = min(least.get(key, one.step_s), one.step_s)
    unlike, rules, met = Unlike(Prices(space)), Rules(), 0
    for inside in space.insides(rules):
        number = unlike.prices.price(inside)
        for row in map(tuple, apart(space.outsides(inside, rules)).tolist()):
            cut = tuple(filled_sizes(space.shape, row[0] * row[1]))
            ways = {in_words(way.stands): way.bound_s for way in unlike.placed(number, row, cut, float("inf"))}
            plain = space.layout(inside, row)
            for stands_so in stands(space.cluster, plain):
                key = kind_of(replace(plain, stage_groups=stands_so))
                if key in least and stands_so in ways:
                    met += 1
                    assert ways[stands_so] <= least[key] * (1 + 1e-9), (inside, row, stands_so)
                    each = tuple(tuple(one.split("+")) for one in stands_so)
                    if row[1] == 1 and row[0] > 1:
                        assert unlike._spread(number, row, [each])[0] <= least[key] * (1 + 1e-9), (inside, row, each)
                elif key in least:  # no order of whole groups, and no better than those
                    assert min(ways.values()) <= least[key] * (1 + 1e-9), (inside, row, stands_so)
    assert met >= min(len(least), 3)


def kind_of(layout: ParallelLayout) -> tuple[object, ...]:
    """What cuts and recomputed layers have in common."""
    how = "full" if layout.recompute in ("none", "full") else tuple(sorted(layout.recompute_parts))
    return (layout.tp, layout.sp, layout.ep, layout.etp, how, layout.pp, layout.vpp, layout.zero, layout.shard_ranks,
            layout.schedule_kind, layout.stage_groups)  # fmt: skip


def test_rooms_matter() -> None:
    """In every problem some layouts, and among them the fastest of all, do not fit in the smallest rooms."""
    for name, problem in PROBLEMS.items():
        _, fitting = limited(name, min(problem.rooms))
        assert len(fitting) < len(every(name)) / 2, name
        assert min(every(name), key=lambda one: one.step_s) not in fitting, name


LLAMA_8B = ModelShape("Llama 3.1 8B", 4096, 32, 8, 128, 128256, transformer(32, 0, 0), ffn=14336)
JOB = replace(BASE, global_batch=256)


def two_memories() -> Cluster:
    """2 nodes of A100 80 GB (2.039 TB/s) and 2 of A100 40 GB (1.555 TB/s): the figures of NVIDIA's data sheet."""
    made = Cluster.load("a100-sxm-selene", devices=32)
    return replace(made, groups=(Group("80 GB", 16), Group("40 GB", 16, 40 * 10**9, 1.555e12)))


def slow_node() -> Cluster:
    made = Cluster.load("h100-sxm-roce400", devices=32)
    return replace(made, groups=(Group("full", 24), Group("slow", 8, compute=0.7)))


def timeline_s(shape: ModelShape, layout: ParallelLayout, cluster: Cluster) -> float:
    """A 1F1B step by hand: each stage's chunk as on a cluster of its devices, the schedule of torch, once a step."""
    rates = efficiency_of(cluster.device.name)
    alone = [price(shape, replace(layout, stage_groups=()), cluster.among((name,))) for name in layout.stage_groups]
    times = [one.chunk_seconds(rates) for one in alone]
    forward, backward = ([float(both[which][i]) for i, both in enumerate(times)] for which in (0, 1))
    schedule = make_schedule("1f1b", layout.pp, 1, layout.micro_batches)
    pipe_s = schedule_s(schedule, forward, backward, [0.0] * layout.pp, alone[0].hop_s * rates.links)
    made = price(shape, layout, cluster)
    return made.around(pipe_s, *made.chunk_seconds(rates), rates)[0]


@pytest.mark.parametrize("cluster", [two_memories(), slow_node()], ids=["two memories", "a slow node"])
def test_the_found_plan_beats_the_equal_split_in_the_timeline(cluster: Cluster) -> None:
    """The same mesh with equal stages, where the slowest gates; and no pipeline at all, where everyone waits."""
    pins: Pins = {"pp": (4,), "schedule": ("1f1b",), "micro_batch": (1,), "cp": (1,), "recompute": ("full",)}
    found = best(Space(LLAMA_8B, cluster, JOB, pins), gap=0.05).best
    layout = found.layout
    equal = replace(layout, cut=(8, 8, 8, 8), recompute="full", recomputed=(0, 0, 0, 0))
    gated = estimate(LLAMA_8B, equal, cluster)
    assert gated.peak_bytes <= gated.room_bytes
    predicted = step_s(price(LLAMA_8B, equal, cluster), efficiency_of(cluster.device.name)) / found.step_s
    timed = timeline_s(LLAMA_8B, equal, cluster) / timeline_s(LLAMA_8B, layout, cluster)
    assert predicted > 1.02
    assert timed == pytest.approx(predicted, rel=1e-9)
