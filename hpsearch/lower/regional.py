"""Regional compilation: each emitted function compiled by Inductor once, however many blocks run it.

A program has one forward and one backward for each class of block, not for each block, so compile time does not grow
with depth. Collectives stay calls inside the compiled code; gathers, reductions and their order stay as emitted. Where
experts are spread over ranks, rows have no fixed number: what sends them stays as it is, and what stands between is
compiled for any number of them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpsearch.errors import LoweringError
from hpsearch.lower.expert_calls import spreads_experts

PHASES = ("forward", "backward_input", "backward_weight")


class Region:
    """An emitted function, compiled when it is first called."""

    def __init__(self, name: str, function: Callable[..., Any], sized: bool = True) -> None:
        """`sized`: whether every tensor has the same size in every call."""
        self.name, self._plain = name, function
        self._compiled = torch.compile(function, fullgraph=sized, dynamic=False if sized else None)
        self.compile_s: float | None = None
        """Seconds of the first call, nearly all of which are compilation; None before it."""

    def __call__(self, *args: Any) -> Any:
        if self.compile_s is not None:
            return self._compiled(*args)
        start = time.perf_counter()
        made = self._compiled(*args)
        self.compile_s = time.perf_counter() - start
        return made


def regions(functions: Mapping[str, Any], pieces: Mapping[str, Any], device: torch.device) -> dict[str, Region]:
    """Function → its region, for every phase of every piece. LoweringError: there is no C++ compiler."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise LoweringError(
            "regional compilation", "expected a C++ compiler on the path, but found none of g++, clang++, c++",
            "Install one, or leave inductor=True out.",
        )  # fmt: skip
    found = {}
    for name, piece in pieces.items():
        made = {f"{name}_{phase}" for phase in PHASES} & set(functions)
        found |= {f: Region(f, functions[f], sized=not spreads_experts(piece.code)) for f in sorted(made)}
    return found


def compile_seconds(found: Mapping[str, Region]) -> dict[str, float]:
    """Function → seconds of its compilation, of those that were called."""
    return {name: region.compile_s for name, region in found.items() if region.compile_s is not None}
