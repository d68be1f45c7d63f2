"""`python -m hpsearch.validate rows.jsonl [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hpsearch.errors import HpsearchError
from hpsearch.validate.predict import predict, read_rows
from hpsearch.validate.report import report
from hpsearch.validate.score import scores


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, or its figures as JSON with errors as fractions."""
    parser = argparse.ArgumentParser(prog="python -m hpsearch.validate", description=__doc__)
    parser.add_argument("rows", type=Path, help="published results, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="figures only")
    asked = parser.parse_args(arguments)
    try:
        rows = read_rows(asked.rows)
        found, refused = predict(rows)
    except HpsearchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(scores(found, rows), indent=1) if asked.json else report(found, refused, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
