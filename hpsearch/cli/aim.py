"""`hpsearch aim`: other objectives than the shortest step, each with its proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hpsearch.aim import DIMENSIONS, Aim, Front, Reached, Verdict, front, ranked, reach
from hpsearch.aim.front import Ranked
from hpsearch.aim.narrow import OnePass
from hpsearch.aim.over import FARTHEST, counts, multiples, stated
from hpsearch.aim.price import MEASURES, tariff_of
from hpsearch.aim.vary import SHARE, steadiness, steady, ties
from hpsearch.cli.estimate import pins_of
from hpsearch.cli.machine import load_machine, load_parts
from hpsearch.cli.model import load_graph
from hpsearch.cli.options import ClusterName, Devices, GlobalBatch, Model, SeqLen
from hpsearch.cli.screen import progress_bar, show
from hpsearch.cli.search import in_words
from hpsearch.errors import LegalityError
from hpsearch.estimate import memory, shape_of_graph
from hpsearch.estimate.pins import PRECISIONS
from hpsearch.files import check_output
from hpsearch.plan import units
from hpsearch.plan.tables import table
from hpsearch.space import Found, Space
from hpsearch.space.layout_file import layout_file, save
from hpsearch.space.pins import space_of

LISTS = ("front", "plans")
OBJECTIVES = (*DIMENSIONS, *LISTS)
TOP = 10
READ_BY = {
    "--price": tuple(MEASURES), "--imbalance": ("robust",), "--seed": ("robust",), "--top": LISTS,
    "--over": tuple(name for name, varied in DIMENSIONS.items() if varied),
    **dict.fromkeys(("--step-below", "--tokens-per-second", "--output"), tuple(DIMENSIONS)),
}  # fmt: skip
"""Of options that not every objective reads: which do."""


def aim_command(
    objective: Annotated[str, typer.Argument(metavar="OBJECTIVE", help=f"One of {', '.join(OBJECTIVES)}.")],
    model: Model,
    cluster: ClusterName,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    over: Annotated[
        str | None,
        typer.Option(metavar="N,…|N..M/STEP", help="Device counts, batches or lengths to look at, not those told."),
    ] = None,
    step_below: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="A step may take so long.")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="RATE", min=0, help="All devices together do this at least.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="Of a device: '2.5 USD/h' for cost, '700 W' for energy; else the cluster's own.")
    ] = None,
    imbalance: Annotated[
        float, typer.Option(min=1, help="For robust: tokens of the fullest expert rank over the average, at worst.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="For robust: of the simulations with other prices.")] = 0,
    top: Annotated[int, typer.Option(metavar="K", min=1, help="Points of the front, or plans, that are shown.")] = TOP,
    fix: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="As in `hpsearch search`.")] = None,
    precision: Annotated[str, typer.Option(help=f"Of matmuls: {', '.join(PRECISIONS)}.")] = "bf16",
    gap: Annotated[float, typer.Option(min=0, max=1, help="Each search stops this near to its bound.")] = 0.001,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="F", help="Write the layout here.")] = None,
) -> None:
    """Searches for what is asked: tokens/s a device, cost, energy, fewest devices, largest batch, longest sequence,
    step against memory, or plans of different meshes."""
    _check_read(objective, {
        "--over": over, "--step-below": step_below is not None, "--price": price,
        "--tokens-per-second": tokens_per_second is not None, "--imbalance": imbalance != 1, "--seed": seed,
        "--top": top != TOP, "--output": output,
    })  # fmt: skip
    if output is not None:
        check_output(output)
    machine = load_machine(cluster, devices)
    with progress_bar(f"capturing {model}"):
        graph = load_graph(model, seq_len, "bf16")
    space = space_of(
        shape_of_graph(graph), machine, pins_of(fix or []), global_batch=global_batch, seq_len=seq_len,
        precision=precision,
    )  # fmt: skip
    if objective in LISTS:
        show_list(objective, space, top, gap=gap)
        return
    varied = DIMENSIONS[objective]
    values = stated(over) if over else _values(varied, space)
    clusters = load_parts(cluster, machine, values) if varied == "devices" else {}
    limit_s = float("inf") if step_below is None else step_below
    tariff = tariff_of(objective, price, machine) if objective in MEASURES else None
    aim = Aim(objective, space, values, clusters, limit_s, tokens_per_second or 0.0, tariff, imbalance)
    unit = {"batch": global_batch, "sequence": seq_len}.get(objective, 0)
    at, found = answer(aim, 0 if over else unit, gap=gap)
    if objective == "robust":
        show_steadiness(space, found, imbalance, seed)
    if output is not None:
        save(layout_file(at, found), output)
        show(Text(f"Written to {output}."))


def _check_read(objective: str, given: dict[str, object]) -> None:
    """LegalityError: an objective that is none, or an option that would do nothing."""
    if objective not in OBJECTIVES:
        raise LegalityError(f"objective {objective!r}", f"expected one of {', '.join(OBJECTIVES)}", "Ask for one.")
    for name in (name for name, value in given.items() if value and objective not in READ_BY[name]):
        if name == "--over":
            problem = f"expected an objective that varies something, but {objective} does not"
        elif objective in LISTS and len(READ_BY[name]) == len(DIMENSIONS):
            problem = f"expected an objective with one answer, but {objective} gives several"
        else:
            problem = f"expected {' or '.join(READ_BY[name])}, but {objective} does not read it"
        raise LegalityError(name, problem, f"Leave it out, or ask for one of {', '.join(READ_BY[name])}.")


def _values(varied: str, space: Space) -> tuple[int, ...]:
    if varied == "devices":
        return counts(space.cluster.tiers, space.devices)
    given = {"global_batch": space.global_batch, "seq_len": space.base.seq_len}.get(varied)
    return multiples(given, FARTHEST * given) if given else ()


def answer(aim: Aim, between: int, *, gap: float) -> tuple[Space, Found]:
    """Looks, prints, and gives the layout found with its space."""
    with progress_bar("searching"):
        found = reach(aim, gap=gap, between=between)
    space, layout = found.space, found.found.best.layout
    tokens = space.global_batch * space.base.seq_len / found.found.best.step_s
    show(
        Text(f"{space.shape.name} on {space.devices} devices of {space.cluster.name}, {space.global_batch} rows of "
             f"{space.base.seq_len} tokens: {in_words(layout)}"),
        Text(f"A step takes {units.seconds(found.found.best.step_s)}: {tokens:,.0f} tokens/s, "
             f"{tokens / space.devices:,.0f} a device; {units.size(memory(space.shape, layout).peak_bytes)} a device."),
        *([_verdicts(found)] if aim.dimension else []), Text(_proof(found)),
    )  # fmt: skip
    return space, found.found


def _verdicts(found: Reached) -> Table:
    aim = found.aim
    made = table(f"Every value of {aim.dimension} stated", aim.dimension, "step", "bound", "limit", aim.kind, "verdict")
    for one in found.verdicts:
        step = units.seconds(one.step_s) if one.keeps or one.step_s < float("inf") else ""
        bound = units.seconds(one.bound_s) if one.bound_s < float("inf") else ""
        limit = units.seconds(one.limit_s) if one.limit_s < float("inf") else ""
        made.add_row(f"{one.value:,}", step, bound, limit, _score(aim, one), _verdict(found, one))
    return made


def _score(aim: Aim, one: Verdict) -> str:
    if aim.kind == "rate" and one.step_s < float("inf"):
        space = aim.at(one.value)
        return f"{space.global_batch * space.base.seq_len / one.step_s / one.value:,.0f} tokens/s a device"
    if aim.tariff is not None and one.step_s < float("inf"):
        return f"{aim.score(one.value, one.step_s):.4g} {aim.tariff.unit} a step"
    return ""


def _verdict(found: Reached, one: Verdict) -> str:
    if one.value == found.value:
        return "chosen"
    if one.is_excluded:
        return (
            "excluded: no layout is legal and fits"
            if one.bound_s == float("inf")
            else "excluded: its bound is above the limit"
        )
    if one.keeps:
        return "worse"
    if not one.is_searched:
        return "not better"
    return "none found that keeps the limit, but its bound does"


PROVEN = {
    "time": "no shorter step", "robust": "no shorter step at the worst prices", "rate": "no more tokens/s a device",
    "cost": "no lower price of a step", "energy": "no less energy for a step",
    "devices": "no fewer devices keep the limit", "batch": "no larger batch", "sequence": "no longer sequence",
}  # fmt: skip


def _proof(found: Reached) -> str:
    aim, values = found.aim, ", ".join(map(str, found.aim.values))
    what = PROVEN[aim.kind]
    how = "" if found.gap <= 0 else f" (gap {found.gap:.2%})"
    one_pass = " of one micro-batch (without a limit any batch fits: micro-batches add up)"
    among = one_pass if isinstance(found.space, OnePass) else ""
    paid = "" if aim.tariff is None else f" {aim.tariff}"
    return (
        f"Proven{how}: {what}{paid} among {aim.dimension or 'devices'} {values}, over all layouts{among} of the space, "
        f"by this cost model. Space: {found.found.certificate.space}."
    )


def show_list(kind: str, space: Space, most: int, *, gap: float) -> None:
    """The front, a twentieth of memory from point to point; or the best plans of different meshes."""
    with progress_bar("searching"):
        if kind == "front":
            points = front(space, step=FRONT_STEP, most=most, gap=gap)
            shown = _points(space, points), Text(_front_proof(points))
        else:
            plans = ranked(space, most, gap=gap)
            shown = _plans(space, plans), Text("Proven: no mesh that is not above a line has a layout below its bound.")
    show(*shown)


def show_steadiness(space: Space, found: Found, imbalance: float, seed: int) -> None:
    """How the plan stands when prices are off, and which plans are not told apart from it."""
    layout = replace(found.best.layout, imbalance=space.base.imbalance)
    now = steadiness(space, layout, seed=seed)
    said = [
        f"That is with every price {SHARE:.0%} above the tables"
        + (f", and {imbalance:.4g} times the average tokens on one expert rank." if imbalance > 1 else "."),
        f"{now.draws:,} simulations with every price off by up to {SHARE:.0%}, each on its own (seed {now.seed}): "
        f"{units.seconds(now.least_s)} to {units.seconds(now.most_s)}, {now.inside:.1%} of them in the plan's band, "
        f"{units.seconds(now.low_s)} to {units.seconds(now.high_s)}.",
    ]
    near = [one for one in ties(space, found, seed=seed) if one.is_open or one.is_near]
    said += [
        f"{'Not told apart' if one.is_open else 'Nearly as fast'}: {in_words(one.choice.layout)}, {one.slower:.1%} "
        f"slower at the worst, and slower in {one.beaten:.0%} of the same simulations."
        for one in near
    ]
    simple = steady(found, near)
    if simple is not found.best:
        said.append(f"The simplest of these is chosen: {in_words(simple.layout)}.")
    show(Text("\n".join(said)))


FRONT_STEP = 0.05
"""Memory from one point of the front to the next, at least, as a share."""


def _points(space: Space, found: Front) -> Table:
    made = table("Step against memory", "layout", "step", "bound", "memory", "of the device")
    for one in found.points:
        share = f"{one.peak_bytes / space.cluster.device.memory_bytes:.1%}"
        made.add_row(
            in_words(one.choice.layout), units.seconds(one.choice.step_s), units.seconds(one.bound_s),
            units.size(one.peak_bytes), share,
        )  # fmt: skip
    return made


def _front_proof(found: Front) -> str:
    least = found.nothing_within_bytes
    end = f" No layout fits in {units.size(least)}." if least is not None else " Less memory was not looked at (--top)."
    return f"Proven: within the bytes of a point less {found.step:.0%}, no layout takes less than the next bound.{end}"


def _plans(space: Space, found: tuple[Ranked, ...]) -> Table:
    made = table("The best of different meshes", "layout", "step", "bound", "memory", "slower")
    for one in found:
        peak = memory(space.shape, one.choice.layout).peak_bytes
        slower = f"{one.choice.step_s / found[0].choice.step_s - 1:.1%}"
        made.add_row(
            in_words(one.choice.layout), units.seconds(one.choice.step_s), units.seconds(one.bound_s), units.size(peak),
            slower,
        )  # fmt: skip
    return made
