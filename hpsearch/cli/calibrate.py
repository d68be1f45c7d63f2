"""`hpsearch calibrate`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from hpsearch.cli.screen import progress_bar, show
from hpsearch.cluster import Cluster
from hpsearch.cluster.efficiency import NAMES, efficiency_of
from hpsearch.plan.tables import table
from hpsearch.plan.units import seconds
from hpsearch.validate.calibrate import ASKED, Calibration, calibrate, source_text, write_cluster
from hpsearch.validate.runs import Runs, read_runs
from hpsearch.validate.score import summary


def calibrate_command(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A name (see `hpsearch clusters`) or a folder.")],
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Measured steps, one JSON object a line.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write the cluster with its numbers here.")
    ] = None,
    free: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help=f"Fit these alone (default {','.join(ASKED)}; also {NAMES[-3]}, …)."),
    ] = "",
) -> None:
    """Fits the few efficiencies of a cluster to steps measured on it, and says what they cannot tell.

    A line of RUNS is a row of the published schema, or {"model": "config.json", "seq_len": 4096, "global_batch": 512,
    "devices": 64, "layout": "tp=8,pp=2,micro_batch=1", "step_s": 3.2}, with "precision" and "name" if you like.
    """
    with progress_bar(f"reading {runs}"):
        read = read_runs(runs, cluster)
        machine = Cluster.load(cluster, devices=read.used[0].priced.layout.devices)
        asked = tuple(word.strip() for word in free.split(",") if word.strip())
        found = calibrate(read.used, machine, asked)
    if output is not None:
        numbers = len(found.own)
        write_cluster(output, cluster, found, source_text(runs, len(found.runs), numbers))
    show(_runs_table(found), _numbers_table(found, machine), *_words(found, read, output))


def _runs_table(found: Calibration) -> RenderableType:
    made = table("Runs", "run", "measured", "before", "off", "after", "off")
    errors = zip(found.errors(found.before_s), found.errors(found.after_s), strict=True)
    for run, before, after, (was, now) in zip(found.runs, found.before_s, found.after_s, errors, strict=True):
        made.add_row(run.name, seconds(run.seconds), seconds(before), f"{was:+.1%}", seconds(after), f"{now:+.1%}")
    return made


def _numbers_table(found: Calibration, machine: Cluster) -> RenderableType:
    in_use = efficiency_of(machine.device.name, machine.efficiency)
    made = table("Numbers", "number", "until now", "fitted", "standard error")
    for number in found.fitted.numbers:
        until_now = f"{getattr(in_use, number.name):.4g}"
        made.add_row(number.name, until_now, f"{number.value:.4g}", f"{number.error:.1%}")
    return made


def _words(found: Calibration, read: Runs, output: Path | None) -> list[RenderableType]:
    was, now = (summary(found.errors(predicted)) for predicted in (found.before_s, found.after_s))
    said = [
        f"{len(found.runs)} runs, {len(found.own)} numbers. Off before: {_off(was)}; after: {_off(now)}.",
    ]
    if found.unexercised:
        said.append(f"No run depends on {', '.join(found.unexercised)}: as before.")
    if found.fitted.kept:
        said.append(f"The runs say less than is known about {', '.join(found.fitted.kept)}: as before.")
    counts = Counter(why for _, why in read.left_out)
    said += [f"{count} rows left out: {why}." for why, count in counts.most_common()]
    said.append(f"Written to {output}: --cluster {output}/" if output else "Nothing written: name a folder with -o.")
    return [Text("\n".join(said))]


def _off(errors: dict[str, float]) -> str:
    return f"{errors['median']:.1%} in the median, {errors['p90']:.1%} at the 90th centile, bias {errors['bias']:+.1%}"
