"""`hpsearch search` and `hpsearch rules`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hpsearch.cli import INTERRUPTED
from hpsearch.cli.estimate import pins_of
from hpsearch.cli.machine import load_machine
from hpsearch.cli.model import load_graph
from hpsearch.cli.options import ClusterName, Devices, GlobalBatch, Model, SeqLen
from hpsearch.cli.screen import progress_bar, show
from hpsearch.errors import PlanError, counted
from hpsearch.estimate import ParallelLayout, memory, shape_of_graph
from hpsearch.estimate.parallel import AS_RUN
from hpsearch.estimate.pins import PRECISIONS
from hpsearch.plan import units
from hpsearch.plan.tables import table
from hpsearch.space import RULES, Found, Space, answers
from hpsearch.space.layout_file import layout_file, save
from hpsearch.space.pins import SWITCHES, space_of
from hpsearch.space.space import PINS

OPEN_CUTS = 0.005
"""A gap beyond this, with nothing left open, is told apart."""
OTHERS = 5
"""Layouts with another mesh that are shown beside the best."""


def search_command(
    model: Model,
    cluster: ClusterName,
    devices: Devices,
    global_batch: GlobalBatch,
    seq_len: SeqLen,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help=f"Dimensions: {', '.join(PINS)}. Switches: {', '.join(SWITCHES)}."),
    ] = None,
    precision: Annotated[str, typer.Option(help=f"Of matmuls: {', '.join(PRECISIONS)}.")] = "bf16",
    gap: Annotated[float, typer.Option(min=0, max=1, help="Stop once the best is proven to be this near.")] = 0.001,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Stop with the best so far, and its gap.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="F", help="Write the layout here.")] = None,
) -> None:
    """Finds the best layout over all dimensions (pipelines, experts, long context too), and proves how good it is."""
    if output is not None and output.is_dir():
        raise PlanError(str(output), "cannot be written: it is a folder", f"Name a file, as {output / 'plan.json'}.")
    if output is not None and not output.parent.is_dir():
        raise PlanError(str(output), f"cannot be written: there is no folder {output.parent}", "Create it first.")
    machine = load_machine(cluster, devices)
    pins = pins_of(fix or [])
    with progress_bar(f"capturing {model}"):
        graph = load_graph(model, seq_len, "bf16")
    space = space_of(
        shape_of_graph(graph), machine, pins, global_batch=global_batch, seq_len=seq_len, precision=precision
    )
    found, is_stopped = _searched(space, gap, float("inf") if time_limit is None else time_limit)
    show(Text(_headline(space, found)), _steps(space, found), Text(_cut(found.best.layout)), _proof(found))
    if output is not None:
        save(layout_file(space, found), output)
        show(Text(f"Written to {output}."))
    if is_stopped:
        raise typer.Exit(INTERRUPTED)


def _searched(space: Space, gap: float, time_limit_s: float) -> tuple[Found, bool]:
    """The best of a space, and whether Ctrl-C ended the search: with the best so far and its gap at the next step, or,
    pressed again, at once with the gap of when it was found. Exit: there was no answer yet."""
    latest: Found | None = None
    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        if latest is None or is_stopped:
            is_stopped = True
            raise KeyboardInterrupt
        is_stopped = True

    with progress_bar("searching for a first answer") as bar, _on_interrupt(stop):

        def watch(best_s: float, bound_s: float) -> bool:
            if latest is not None:
                proven = f"at most {1 - bound_s / best_s:.1%} more to gain"
                told = f"{units.seconds(best_s)}, {proven}: {in_words(latest.best.layout)}"
                bar.update(bar.task_ids[0], description=told, total=1.0, completed=bound_s / best_s)
            return not is_stopped

        try:
            for found in answers(space, gap=gap, time_limit_s=time_limit_s, watch=watch):
                latest = found
        except KeyboardInterrupt:
            is_stopped = True
    if latest is None:
        print("hpsearch: interrupted before there was an answer; nothing is written.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    return latest, is_stopped


@contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def in_words(layout: ParallelLayout) -> str:
    """tp=8 pp=16 dp=8 ZeRO-1, …"""
    words = [f"{name}={getattr(layout, name)}" for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")]
    said = [word for word in words if not word.endswith("=1")]
    if layout.schedule_kind not in AS_RUN:
        said.append(layout.schedule_kind)
    if layout.cp > 1:
        said.append(layout.cp_kind)
    said.append(f"ZeRO-{layout.zero}" + (f" over {layout.shard_ranks}" if layout.shard_ranks else ""))
    counts = "/".join(str(count) for _, count in layout.uneven) or str(layout.micro_batches)
    said.append(f"{counts}x{layout.micro_batch} rows")
    if layout.recomputed:
        said.append(f"{sum(layout.recomputed)} of {sum(layout.cut)} layers recomputed")
    elif layout.recompute == "selective":
        said.append(f"{'+'.join(sorted(layout.recompute_parts))} recomputed")
    return " ".join(said)


def _headline(space: Space, found: Found) -> str:
    layout = found.best.layout
    idle = space.devices - layout.devices
    rows = layout.rows - space.global_batch
    notes = [f"{idle} of {space.devices} devices stand idle"] if idle else []
    notes += [f"{rows} rows of the last micro-batches are empty"] if rows else []
    if layout.uneven:
        counts = zip(space.cluster.groups, layout.uneven, strict=True)
        each = ", ".join(f"{counted(n, 'micro-batch')} on {group.name}" for group, (_, n) in counts)
        notes.append(f"a data rank has {each}")
    chosen = found.chosen
    if chosen is not found.best:
        slower = chosen.step_s / found.best.step_s - 1
        notes.append(f"simpler and {slower:.1%} slower: {in_words(chosen.layout)}")
    return f"{space.shape.name} on {space.devices} devices of {space.cluster.name}: {in_words(layout)}" + "".join(
        f"\n{note}." for note in notes
    )


def _steps(space: Space, found: Found) -> Table:
    made = table("Solved on the way, one a mesh", "layout", "step", "tokens/s a device", "memory", "slower")
    seen: set[tuple[int, ...]] = set()
    for choice in found.tried:
        layout = choice.layout
        mesh = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep)
        if mesh in seen or len(seen) > OTHERS:
            continue
        seen.add(mesh)
        tokens = space.global_batch * layout.seq_len / choice.step_s / space.devices
        peak = memory(space.shape, layout).peak_bytes
        slower = f"{choice.step_s / found.best.step_s - 1:.1%}"
        made.add_row(in_words(layout), units.seconds(choice.step_s), f"{tokens:,.0f}", units.size(peak), slower)
    return made


def _cut(layout: ParallelLayout) -> str:
    if layout.pp == 1:
        return _stands(layout).strip()
    again = f", of which are recomputed {list(layout.recomputed)}" if layout.recomputed else ""
    return f"Layers of the {layout.pp * layout.vpp} chunks: {list(layout.cut)}{again}.{_stands(layout)}"


def _stands(layout: ParallelLayout) -> str:
    """`Where: stages 0 to 2 on full, stage 3 on slow.`; nothing where all devices are alike."""
    said, at = [], 0
    for name, stages in groupby(layout.stage_groups):
        last = at + len(list(stages)) - 1
        said.append(f"stage {at} on {name}" if at == last else f"stages {at} to {last} on {name}")
        at = last + 1
    words = ", ".join(said)
    return f" Where: {words}." if said else ""


def _proof(found: Found) -> Text:
    proof = found.certificate
    counts = f"{proof.considered:,} considered, {proof.pruned:,} excluded by bounds, {proof.solved:,} solved"
    counts += f", {proof.left:,} left open." if proof.left else "."
    if not proof.solved:  # ended among the first answers, which are tried before any bound is known
        counts = f"Ended before any was proven; {counted(len(found.tried), 'layout')} tried for a first answer."
    lines = [
        f"Proven: no layout of the space takes less than {units.seconds(proof.bound_s)} (gap {proof.gap:.2%}), by this "
        f"cost model. {counts}",
        f"Space: {proof.space}.",
    ]
    if proof.gap > OPEN_CUTS and proof.solved and not proof.left:
        lines.insert(1, "The gap is that of cuts into stages: all are bounded, the best found by moving single layers.")
    lines += [f"Refused by {rule} ({counted(count, 'time')}): {what}." for rule, what, count in proof.refused]
    return Text("\n".join(lines))


def rules_command() -> None:
    """Prints what makes a layout illegal, with the reasons."""
    made = table("Rules", "rule", "field", "why")
    for rule in RULES:
        made.add_row(rule.name, rule.field, rule.text)
    show(made)
