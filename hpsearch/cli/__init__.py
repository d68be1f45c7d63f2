"""The command line."""

from hpsearch.cli.app import app, main

__all__ = ["app", "main"]
