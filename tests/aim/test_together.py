"""Two modules planned together: the split equals enumeration of all splits, layouts and orders; the bound is below it;
memory of modules on the same devices adds up; the best fixed split is slower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import pytest

from hpsearch.aim.forward import best_forward, forward_bytes
from hpsearch.aim.module import Job, Module
from hpsearch.aim.tasks import Task, least_s, ran
from hpsearch.aim.together import Together, shared, splits, together
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import efficiency_of
from hpsearch.errors import InfeasibleError, LegalityError
from hpsearch.estimate import ModelShape, ParallelLayout, memory, price, rank_memory
from hpsearch.estimate.shape import transformer
from hpsearch.estimate.stages import filled_sizes
from hpsearch.space import Space
from tests.space.naive import every_layout, step_s

BASE = ParallelLayout(devices=1, seq_len=2048, micro_batch=1, global_batch=6, overlap_grad_reduce=True)
MANY = replace(BASE, seq_len=8192, global_batch=12)
DECODER = ModelShape("decoder", 2048, 16, 4, 128, 32000, transformer(4, 0, 0), ffn=8192)
ENCODER = ModelShape("encoder", 1024, 16, 16, 64, 0, transformer(4, 0, 0), ffn=4096, gated=False, causal=False)
PINS = {
    "cp": (1,), "micro_batch": (1, 3), "recompute": ("full",), "vpp": (1,), "zero": (0, 1, 3), "sp": (False,),
    "tp": (1, 2), "pp": (1, 2), "shard_ranks": (0,), "schedule": ("1f1b",),
}  # fmt: skip
SIZES = (1, 2, 3, 4)
FORWARD_PINS = {**PINS, "zero": (0, 3)}


def module(name: str, shape: ModelShape, trains: bool = True, **more: tuple[str, ...]) -> Module:
    return Module(name, shape, BASE, trains, pins=PINS if trains else FORWARD_PINS, **more)  # type: ignore[arg-type]


JOBS = {
    "encoder, decoder": Job((module("enc", ENCODER), module("dec", DECODER, takes=("enc",)))),
    "frozen encoder": Job((module("enc", ENCODER, trains=False), module("dec", DECODER, takes=("enc",)))),
    "reference, actor": Job((module("ref", DECODER, trains=False), module("act", DECODER, after=("ref",)))),
    "side by side": Job((module("one", DECODER), module("two", ENCODER))),
    "long rows": Job((
        module("one", DECODER), replace(module("two", ENCODER), base=replace(BASE, seq_len=32768, global_batch=2)),
    )),
    "much to do": Job((
        replace(module("enc", ENCODER, trains=False), base=MANY),
        replace(module("dec", DECODER, takes=("enc",)), base=MANY),
    )),
}  # fmt: skip


@cache
def clusters(room: int) -> dict[int, Cluster]:
    found = {n: Cluster.load("h100-sxm-roce400", devices=n) for n in SIZES}
    return {n: replace(c, device=replace(c.device, memory_bytes=room)) for n, c in found.items()}


@dataclass(frozen=True)
class Option:
    """A layout of a module on some devices, priced by plain means: forward, pipeline, once; peak and what stays."""

    forward: float
    pipe: float
    once: float
    peak: float
    stays: float


@cache
def options(job: str, name: str, devices: int, chunks: int, room: int) -> tuple[Option, ...]:
    """All that fit alone and that no other is better than in everything."""
    one, cluster = JOBS[job].of(name), clusters(room)[devices]
    chunks = chunks if JOBS[job].is_chained(one) else 1
    base = replace(one.base, global_batch=one.base.global_batch // chunks)
    made = trained(one, cluster, base) if one.trains else forwards(one, cluster, base)
    sent = 2 * base.global_batch * base.seq_len * one.shape.hidden / devices
    fitting = [replace(option, stays=option.stays + sent) for option in made if option.peak <= room]
    values = sorted({tuple(vars(option).values()) for option in fitting})
    return tuple(
        Option(*a) for a in values if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in values)
    )


def trained(one: Module, cluster: Cluster, base: ParallelLayout) -> Iterator[Option]:
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    for layout in every_layout(one.shape, cluster, base, one.pins):
        priced = price(one.shape, layout, cluster)
        whole = step_s(priced, rates)
        f, b = priced.chunk_seconds(rates)
        once = priced.around(0.0, f, b, rates)[0]
        ranks = [rank_memory(one.shape, layout, rank) for rank in range(layout.pp)]
        context = max(dict(m.parts)["context"] for m in ranks) - 0.6e9
        stays = 1.02 * max(m.persistent_bytes for m in ranks) + context
        hop = priced.hop_s * rates.links
        yield Option(passed(f.tolist(), hop, layout.micro_batches), whole - once, once,
                     memory(one.shape, layout).peak_bytes, stays)  # fmt: skip


def forwards(one: Module, cluster: Cluster, base: ParallelLayout) -> Iterator[Option]:
    rates = efficiency_of(cluster.device.name, cluster.efficiency)
    for layout in every_layout(one.shape, cluster, base, one.pins, whole=False):
        layout = replace(layout, cut=tuple(filled_sizes(one.shape, layout.pp)))
        priced = price(one.shape, layout, cluster)
        peak, stays = forward_bytes(one.shape, layout, works_of(one.shape, layout, cluster))
        f = priced.chunk_seconds(rates)[0].tolist()
        yield Option(passed(f, priced.hop_s * rates.links, layout.micro_batches), 0.0, 0.0, peak, stays)


def works_of(shape, layout, cluster):  # type: ignore[no-untyped-def]
    from hpsearch.estimate.estimate import blocks

    return blocks(shape, layout, cluster)[0]


def passed(stages: list[float], hop: float, micro_batches: int) -> float:
    """Every micro-batch through every stage, each stage one at a time."""
    free = [0.0] * len(stages)
    for _ in range(micro_batches):
        at = -hop
        for i, seconds in enumerate(stages):
            at = max(at + hop, free[i]) + seconds
            free[i] = at
    return free[-1]


def every_order(tasks: list[Task], done: dict[int, float], free: dict[int, float]) -> float:
    """The soonest end over all orders in which tasks may begin."""
    if len(done) == len(tasks):
        return max(done.values())
    found = float("inf")
    for i, one in enumerate(tasks):
        if i in done or any(j not in done for j, _ in one.after):
            continue
        start = max([free.get(one.group, 0.0), *(done[j] + way for j, way in one.after)])
        end = start + one.seconds
        found = min(found, every_order(tasks, {**done, i: end}, {**free, one.group: end}))
    return found


def by_hand(job: str, groups: tuple[int, int], chunks: int, first: Option, second: Option, way: float) -> list[Task]:
    """The tasks of the four jobs, written out: what runs, on which devices, behind what."""
    a, b = groups
    made: list[Task] = []

    def add(group: int, seconds: float, *after: tuple[int, float]) -> int:
        made.append(Task("", group, seconds, tuple(one for one in after if one[0] >= 0)))
        return len(made) - 1

    parts = range(chunks)
    if job in ("side by side", "long rows"):
        add(a, first.pipe + first.once), add(b, second.pipe + second.once)
    elif job == "reference, actor":
        add(b, second.pipe + second.once, (add(a, first.forward), 0.0))
    else:
        there, both, last = [-1], [-1], chunks - 1  # parts of one model are alike but for the last: in their order
        for _ in parts:
            there.append(add(a, first.forward, (there[-1], 0.0)))
        for k in parts:
            seconds = second.pipe + (second.once if k == last else 0)
            both.append(add(b, seconds, (there[k + 1], way / chunks), (both[-1], 0.0)))
        if job == "encoder, decoder":
            for k in parts:
                add(a, first.pipe + (first.once if k == last else 0), (both[k + 1], way / chunks))
    return made


@cache
def enumerated(name: str, room: int, sizes: tuple[int, ...] = SIZES) -> float:
    """The soonest end over splits, parts, layouts and orders."""
    job, found = JOBS[name], float("inf")
    x, y = (one.name for one in job.modules)
    link = Cluster.load("h100-sxm-roce400", devices=4).tiers[-1].rate
    for chunks in job.chunks:
        for n, m in [*product(sizes, sizes), *((n, 0) for n in sizes)]:
            if n + m > 4:
                continue
            pairs = product(options(name, x, n, chunks, room), options(name, y, m or n, chunks, room))
            for one, two in pairs:
                if not m and (one.peak + two.stays > room or two.peak + one.stays > room):
                    continue
                way = job.of(x).sent_bytes / (link * min(n, m)) if m else 0.0
                found = min(found, every_order(by_hand(name, (0, 1 if m else 0), chunks, one, two, way), {}, {}))
    return found


CASES = [
    *((name, 40 * 10**9) for name in JOBS), ("long rows", 6 * 10**9),
    pytest.param("encoder, decoder", 6 * 10**9, marks=pytest.mark.exhaustive),
]  # fmt: skip


@pytest.mark.parametrize(("name", "room"), CASES)
def test_the_split_equals_enumeration(name: str, room: int) -> None:
    least = enumerated(name, room)
    found = together(JOBS[name], clusters(room), 4, gap=0.0)
    assert found.bound_s <= least * (1 + 1e-9)
    assert least <= found.step_s * (1 + 1e-9)
    assert found.step_s * (1 - found.gap) <= least * (1 + 1e-9)
    if room > 10**10:
        assert found.step_s == pytest.approx(least, rel=1e-9)
    assert found.step_s <= 1.02 * least
    check(found, room)


def test_parts_of_the_batch_on_two_groups() -> None:
    """No group may have more than two devices: the encoder is at the second part while the decoder has the first."""
    name, sizes, room = "much to do", (1, 2), 40 * 10**9
    found = together(JOBS[name], {n: clusters(room)[n] for n in sizes}, 4, gap=0.0)
    least = enumerated(name, room, sizes)
    assert found.bound_s <= least * (1 + 1e-9)
    assert least <= found.step_s * (1 + 1e-9)
    assert found.step_s <= 1.005 * least
    assert len(found.split) == 2
    assert found.chunks > 1
    check(found, room)
    starts = {task.name: task.start_s for task in found.tasks}
    ends = {task.name: task.end_s for task in found.tasks}
    assert starts["enc forward 1"] < ends["dec forward and backward 0"]


def check(found: Together, room: int) -> None:
    """Devices, memory and order are as they say."""
    assert sum(count for count, _ in found.split) <= 4
    for count, names in found.split:
        ways = [one for one in found.placed if one.module in names]
        stays = sum(one.resident_bytes for one in ways)
        assert all(one.layout.devices <= count for one in ways)
        assert all(one.peak_bytes - one.resident_bytes + stays <= room for one in ways)
    for group in {task.group for task in found.tasks}:
        mine = [task for task in found.tasks if task.group == group]
        assert all(one.end_s <= two.start_s + 1e-12 for one, two in pairwise(mine))
    assert max(task.end_s for task in found.tasks) == found.step_s


@pytest.mark.parametrize("name", JOBS)
def test_it_beats_the_fixed_splits(name: str) -> None:
    found = together(JOBS[name], clusters(40 * 10**9), 4, gap=0.0)
    assert {rule for rule, _, _ in found.fixed} == {"equal", "by parameters", "by work"}
    assert all(found.step_s <= seconds for _, _, seconds in found.fixed)
    if name != "side by side":  # where the split by parameters is the best one
        assert all(found.step_s < 0.95 * seconds for _, _, seconds in found.fixed)


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="expected room for ref, act on 4 devices"):
        together(JOBS["reference, actor"], clusters(2 * 10**9), 4)


def test_the_best_forward_is_the_best_of_all() -> None:
    for devices, room in ((1, 10**10), (4, 10**10), (4, 1_800_000_000)):
        one = module("ref", DECODER, trains=False)
        cluster = clusters(room)[devices]
        every = [option for option in forwards(one, cluster, BASE) if option.peak <= room]
        found = best_forward(Space(DECODER, cluster, BASE, FORWARD_PINS))
        assert found.seconds == pytest.approx(min(option.forward for option in every), rel=1e-9)
        assert found.peak_bytes <= room


def test_tasks_by_hand() -> None:
    """a and b feed c; two groups. a 2 s, b 3 s on another group, c 4 s on the first, 1 s away from b."""
    tasks = [Task("a", 0, 2.0), Task("b", 1, 3.0), Task("c", 0, 4.0, ((0, 0.0), (1, 1.0)))]
    assert [(one.name, one.start_s, one.end_s) for one in ran(tasks)] == [("a", 0, 2), ("b", 0, 3), ("c", 4, 8)]
    assert least_s(tasks) == 8.0
    assert every_order(tasks, {}, {}) == 8.0


def test_splits_and_shares_by_hand() -> None:
    assert set(splits(["a", "b"], (1, 2), 2)) == {
        ((1, ("a", "b")),), ((2, ("a", "b")),), ((1, ("a",)), (1, ("b",))),
    }  # fmt: skip
    assert sum(1 for _ in splits(["a", "b", "c"], (8,), 24)) == 5
    assert shared([1.0, 3.0], (1, 2, 3, 4), 4) == [1, 3]
    assert shared([1.0, 1.0, 1.0], (8, 16), 16) is None


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ((module("dec", DECODER, takes=("enc",)), module("enc", ENCODER)), "'enc' does not"),
        ((module("a", ENCODER), module("a", DECODER)), "it is there twice"),
        ((), "expected at least one module"),
        ((module("a", ENCODER), replace(module("b", DECODER, takes=("a",)), runs=2)), "but runs = 2"),
    ],
)
def test_jobs_that_cannot_be(modules: tuple[Module, ...], words: str) -> None:
    with pytest.raises(LegalityError, match=words):
        Job(modules)


def test_gradients_that_are_waited_for_twice() -> None:
    job = Job((module("a", ENCODER), module("b", DECODER, takes=("a",), after=("a",))))
    with pytest.raises(LegalityError, match="gradients it sends"):
        together(job, clusters(40 * 10**9), 4)
