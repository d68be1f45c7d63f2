"""Options that several commands take, each with its one spelling and help."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(metavar="CFG|module:callable", help="A Hugging Face config.json, or a callable.")]
ClusterName = Annotated[str, typer.Option(metavar="C", help="A name (see `hpsearch clusters`), a file, or local.")]
Devices = Annotated[int, typer.Option(metavar="N", min=1, help="How many devices of the cluster to use.")]
GlobalBatch = Annotated[int, typer.Option(metavar="B", min=1, help="Rows of one optimizer step.")]
SeqLen = Annotated[int, typer.Option(metavar="S", min=1, help="Tokens of one row.")]
