"""`python -m hpsearch.validate rows.jsonl [--json | --leave-one-out | --refit | --bands | --grid | --search]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hpsearch.errors import HpsearchError
from hpsearch.validate.against import against
from hpsearch.validate.bands import bands_report, generations_report
from hpsearch.validate.gains import gains_report
from hpsearch.validate.grid import grid_report, read_grid
from hpsearch.validate.held_out import held_out_report, leave_one_out, measured, refit_text
from hpsearch.validate.predict import predict, read_rows
from hpsearch.validate.report import report
from hpsearch.validate.score import scores


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, or its figures as JSON with errors as fractions."""
    parser = argparse.ArgumentParser(prog="python -m hpsearch.validate", description=__doc__)
    parser.add_argument("rows", type=Path, help="published results, one JSON object a line")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="figures only")
    what.add_argument(
        "--leave-one-out", action="store_true", help="refit without each family, and predict it; about a minute"
    )
    what.add_argument("--refit", action="store_true", help="print efficiencies fitted to all rows, as TOML")
    what.add_argument(
        "--bands", action="store_true", help="print spreads fitted to families left out, as TOML, and who is inside"
    )
    what.add_argument(
        "--grid", action="store_true", help="the file is a CSV grid of one node's steps; leave widths out"
    )
    what.add_argument(
        "--search", action="store_true", help="search the best layout for each row's model, devices, batch and switches"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="with --search: N rows, evenly from the file")
    asked = parser.parse_args(arguments)
    if asked.limit is not None and (not asked.search or asked.limit < 1):
        parser.error(f"--limit: expected a number of rows beside --search, but found {asked.limit}")
    try:
        print(_answer(asked))
    except HpsearchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _answer(asked: argparse.Namespace) -> str:
    if asked.grid:
        return grid_report(read_grid(asked.rows))
    rows, broken = read_rows(asked.rows)
    if asked.search:
        step = max(len(rows) // asked.limit, 1) if asked.limit else 1
        return gains_report(against(rows[::step][: asked.limit]))
    if asked.leave_one_out:
        return held_out_report(leave_one_out(measured(rows)))
    if asked.refit:
        return refit_text(measured(rows))
    if asked.bands:
        runs = measured(rows)
        return f"{bands_report(runs, leave_one_out(runs))}\n\n{generations_report(runs)}"
    found, refused = predict(rows)
    return json.dumps(scores(found, rows), indent=1) if asked.json else report(found, broken | refused, rows)


if __name__ == "__main__":
    sys.exit(main())
