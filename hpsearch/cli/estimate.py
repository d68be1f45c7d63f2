"""`hpsearch estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hpsearch.cli.machine import load_machine
from hpsearch.cli.model import load_graph
from hpsearch.cli.options import ClusterName, Devices, GlobalBatch, Model, SeqLen
from hpsearch.cli.screen import progress_bar, show
from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError, PlanError, counted
from hpsearch.estimate import Estimate, ModelShape, ParallelLayout, estimate, shape_of_graph
from hpsearch.estimate.band import STATED
from hpsearch.estimate.flops import utilisation
from hpsearch.estimate.parallel import AS_RUN
from hpsearch.estimate.pins import NAMES, PRECISIONS, Pinned, check_device, check_shape, layout_of
from hpsearch.estimate.scaled import padded_widths
from hpsearch.plan import units
from hpsearch.plan.tables import table
from hpsearch.space.layout_file import load


def estimate_command(
    model: Model,
    cluster: ClusterName,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help=f"The layout: {', '.join(NAMES)}.")
    ] = None,
    precision: Annotated[str, typer.Option(help=f"Of matmuls: {', '.join(PRECISIONS)}.")] = "bf16",
    layout: Annotated[
        Path | None, typer.Option(metavar="F", help="A layout that `hpsearch search -o F` wrote, in place of --fix.")
    ] = None,
) -> None:
    """Prices one given layout of a model on a cluster: seconds of a step and bytes of a device, and what they are."""
    machine = load_machine(cluster, devices)
    pinned = (
        written(layout, fix, machine, global_batch, seq_len)
        if layout is not None
        else layout_of(
            pins_of(fix or []), devices=devices, global_batch=global_batch, seq_len=seq_len, precision=precision
        )
    )
    check_device(machine.device, pinned.layout)
    with progress_bar(f"capturing {model}"):
        graph = load_graph(model, seq_len, "bf16")
    shape = shape_of_graph(graph)
    if layout is not None and (told := load(layout).question).parameters != shape.total_params:
        problem = f"expected {told.parameters} parameters, those of {told.model}, but {shape.name} has"
        raise PlanError(str(layout), f"{problem} {shape.total_params}", "Search again for this model.")
    check_shape(shape, pinned.layout)
    found = estimate(shape, pinned.layout, machine)
    if layout is not None:
        _check_figures(layout, found)
    show(
        Text(_headline(shape, pinned.layout, machine)),
        Text(f"Not pinned, so: {', '.join(pinned.assumed)}.") if pinned.assumed else Text(""),
        *(Text(f"Matrix units work on padding: {words}.") for words in padded_widths(shape, pinned.layout)),
        _time_table(found),
        Text(_rates(shape, pinned.layout, machine, found)),
        _memory_table(found),
        Text(_verdict(found)),
    )


def written(path: Path, fix: list[str] | None, machine: Cluster, global_batch: int, seq_len: int) -> Pinned:
    """The layout of a file, if it was searched for this job."""
    if fix:
        raise LegalityError("--layout", "expected a file or pins, but got both", "Leave --fix away.")
    found = load(path)
    job: dict[str, str | int] = {"devices": machine.devices, "global_batch": global_batch, "seq_len": seq_len}
    for name, asked in (job | {"cluster": machine.name}).items():
        if (there := getattr(found.question, name)) != asked:
            raise PlanError(str(path), f"expected {name} = {asked}, but it was searched for {there}", "Search again.")
    if (there := found.question.cluster_digest) != machine.digest:
        problem = f"expected the prices of {machine.name} ({machine.digest[:12]}), but it was searched with others"
        raise PlanError(str(path), f"{problem} ({there[:12]})", "`aim robust` takes dearer ones; else search again.")
    return Pinned(found.read(), ())


SAME = 0.01
"""Share by which figures of a layout file may be off: prices have moved since, but not so that it matters."""


def _check_figures(path: Path, found: Estimate) -> None:
    """PlanError: the file states another step or peak than its layout has."""
    told = load(path)
    for name, stated, computed in (
        ("step_s", told.step_s, found.step_s), ("peak_bytes", told.peak_bytes, found.peak_bytes),
    ):  # fmt: skip
        if abs(stated - computed) > SAME * computed:
            problem = f"expected {name} = {computed:.6g}, which its layout takes here, but the file states {stated:.6g}"
            raise PlanError(str(path), problem, "It was changed, or prices were: search again with -o.")


def pins_of(words: list[str]) -> dict[str, str]:
    pins: dict[str, str] = {}
    for word in (piece for given in words for piece in given.split(",") if piece.strip()):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not name or not value:
            raise LegalityError(f"--fix {word}", "expected name=value", f"Names are {', '.join(NAMES)}.")
        if pins.get(name, value) != value:
            raise LegalityError(f"--fix {name}", f"is pinned twice, to {pins[name]} and to {value}", "Pin it once.")
        pins[name] = value
    return pins


def _headline(shape: ModelShape, layout: ParallelLayout, machine: Cluster) -> str:
    degrees = [(name, getattr(layout, name)) for name in ("tp", "cp", "pp", "vpp", "ep", "etp")]
    words = " ".join(f"{name}={value}" for name, value in degrees if value > 1)
    words += f" {layout.schedule_kind}" if layout.schedule_kind not in AS_RUN else ""
    return (
        f"{shape.name} ({units.count(shape.total_params)} parameters, {units.count(shape.active_params)} for a token) "
        f"on {counted(layout.devices, 'device')} of {machine.name} ({machine.device.name}): "
        f"{words + ' ' if words else ''}dp={layout.dp}, ZeRO-{layout.zero}, "
        f"{counted(layout.micro_batches, 'micro-batch')} of {counted(layout.micro_batch, 'row')}, {layout.precision}."
    )


def _time_table(found: Estimate) -> Table:
    made = table("Predicted step", "part", "time", "share")
    for name, value in found.parts:
        if value:
            made.add_row(name, units.seconds(value), f"{value / found.step_s:.1%}")
    made.add_row("step", units.seconds(found.step_s), "")
    made.add_row(f"{STATED:.0%} band", f"{units.seconds(found.low_s)} to {units.seconds(found.high_s)}", "")
    return made


def _rates(shape: ModelShape, layout: ParallelLayout, machine: Cluster, found: Estimate) -> str:
    rate, share = utilisation(shape, layout, machine, found.step_s)
    tokens = layout.rows * layout.seq_len / found.step_s / layout.devices
    return (
        f"{tokens:,.0f} tokens/s and {rate / 1e12:,.0f} model TFLOP/s a device, {share:.1%} of the dense bf16 peak "
        "(causal half of attention, logits counted, nothing for recomputation)."
    )


def _memory_table(found: Estimate) -> Table:
    title = f"Predicted memory of the fullest device (pipeline rank {found.memory.rank})"
    made = table(title, "part", "bytes", "of the device")
    for name, size in found.memory.largest:
        made.add_row(name, units.size(size), f"{size / found.room_bytes:.1%}")
    made.add_row("peak", units.size(found.peak_bytes), f"{found.peak_bytes / found.room_bytes:.1%}")
    return made


def _verdict(found: Estimate) -> str:
    room = found.room_bytes - found.peak_bytes
    if room >= 0:
        return f"It fits, with {units.size(room)} to spare."
    largest = " and ".join(name for name, _ in found.memory.largest[:2])
    return f"It does not fit: {units.size(-room)} too much, most of it {largest}."
