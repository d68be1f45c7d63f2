"""`Efficiency`: how real training compares with the tables it is priced from; a few numbers a device generation.

Every number multiplies seconds (1: as the table says), but for two that are seconds. They are fitted to published runs
and kept in `cost_models/efficiency.toml` with what they leave unexplained; none belongs to a model, a source or a row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from hpsearch.cluster.find import cost_models

FILE_NAME = "efficiency.toml"


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
    kernel_s: float = 6.5e-5
    """Seconds of the host for each counted kernel; hides behind the device unless it is longer. Frameworks issue a few
    for each one counted. Fitted to 1,440 steps of small models on one node (arXiv 2312.12391)."""
    step_s: float = 2e-2
    """Once a step: data, logging, gradient norm, optimizer issue."""
    clock: float = 1.0
    """Of one device kind among its generation: power and cooling decide the clock. Scales matmuls and attention."""


NAMES = tuple(field.name for field in fields(Efficiency))
SPREAD = {
    "linear": 0.15, "linear_low": 0.2, "routed": 0.35, "core": 0.3, "moved": 0.25, "links": 0.3, "data": 0.3,
    "kernel_s": 0.5, "step_s": 1.0, "clock": 0.1,
}  # fmt: skip
"""How far each number may stand from its prior, as a standard deviation of its log."""
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


def device_kind(device: str) -> str:
    """The first word of the name without memory size or form: A100, H100, GB300."""
    return device.split()[0].split("-")[0].upper()


@cache
def content() -> dict[str, dict[str, Any]]:
    """`cost_models/efficiency.toml`: tables `generation` and `device`, by name, by number; table `band` by term."""
    return tomllib.loads((cost_models() / FILE_NAME).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class OwnNumber:
    """One number of a cluster's own."""

    name: str
    value: float
    error: float
    """Standard error of its log."""


def efficiency_of(device: str, own: Sequence[OwnNumber] = ()) -> Efficiency:
    """The fitted numbers of this device's generation, with the device's clock; those of `other` where nobody ran.

    `own`: numbers of the cluster, which count more.
    """
    generations, devices = content()["generation"], content()["device"]
    table = generations.get(generation(device), generations["other"]) | devices.get(device_kind(device), {})
    values = {name: float(entry["value"]) for name, entry in table.items()} | {n.name: n.value for n in own}
    return replace(Efficiency(), **values)


def doubts_of(device: str, own: Sequence[OwnNumber] = ()) -> dict[str, float]:
    """Standard deviation of the log of each number that was not fitted to published runs of this device: its prior's
    spread, or the standard error of the cluster's `own`.

    What fitted numbers are wrong by is in the residuals of the published runs.
    """
    generations, devices = content()["generation"], content()["device"]
    table = generations.get(generation(device), generations["other"])
    found = {name: SPREAD[name] for name, entry in table.items() if entry["kind"] != "fitted"}
    known = {number.name for number in own}
    if device_kind(device) not in devices and not {"linear", "linear_low"} & known:
        found["clock"] = SPREAD["clock"]
    return found | {number.name: number.error for number in own if number.name in found}
