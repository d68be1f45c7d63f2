"""`Efficiency`: how real training compares with the tables it is priced from; a few numbers a device generation.

Every number multiplies seconds (1: as the table says), but for two that are seconds. They are fitted to published runs
and kept in `efficiency.toml` with what they leave unexplained; none belongs to a model, a source or a row.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "efficiency.toml"


@dataclass(frozen=True)
class Efficiency:
    linear: float = 1.1
    """Matmuls in 16 bit."""
    linear_low: float = 1.2
    """Matmuls in 8 or 4 bit."""
    routed: float = 1.5
    """Routed experts: grouped matmuls and what arranges tokens for them."""
    core: float = 1.0
    """Attention core."""
    moved: float = 1.1
    """Memory-bound kernels."""
    links: float = 1.1
    """Collectives on the path: tensor, context, expert parallel."""
    data: float = 1.2
    """Gradient reductions and parameter gathers."""
    kernel_s: float = 8e-6
    """Seconds the host needs to issue one kernel; hides behind the device unless it is longer."""
    step_s: float = 2e-2
    """Once a step: data, logging, gradient norm, optimizer issue."""
    clock: float = 1.0
    """Of one device kind among its generation: power and cooling decide the clock. Scales matmuls and attention."""


NAMES = tuple(field.name for field in fields(Efficiency))
GENERATIONS = {
    "volta": ("V100",),
    "ampere": ("A100", "A800"),
    "hopper": ("H100", "H200", "H800", "GH200"),
    "blackwell": ("B200", "GB200", "B300", "GB300"),
    "cdna3": ("MI300", "MI325"),
}


def generation(device: str) -> str:
    """The device generation by the name of the device; `other` for one nobody has measured."""
    found = [name for name, marks in GENERATIONS.items() if any(mark in device.upper() for mark in marks)]
    return found[0] if found else "other"


@cache
def fitted() -> dict[str, Efficiency]:
    """All generations of `efficiency.toml`."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: replace(Efficiency(), **{key: entry["value"] for key, entry in table.items()})
        for name, table in content["generation"].items()
    }


def efficiency_of(device: str) -> Efficiency:
    """The fitted numbers of this device's generation, else those of `other`."""
    table = fitted()
    return table.get(generation(device), table["other"])
