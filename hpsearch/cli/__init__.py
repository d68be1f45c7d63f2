"""The command line. Its imports take a moment, in which Ctrl-C must not show a traceback: `main` begins with them."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def main() -> NoReturn:
    """The console script: imports and runs a command, and exits with its code; 130 after Ctrl-C."""
    try:
        from hpsearch.cli.app import run

        run()
    except KeyboardInterrupt:
        print("hpsearch: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)


__all__ = ["main"]
