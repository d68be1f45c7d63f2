"""`Aim`: what a layout is wanted for: one number to make small over stated values of one dimension, under a limit.

time      seconds of a step                                          on the devices given
rate      device-seconds of a step: most tokens/s of a device        over device counts
cost      price of the devices for the time of a step                over device counts
energy    power of the devices for the time of a step                over device counts
devices   devices whose step keeps the limit                         over device counts
batch     rows of a step that keeps the limit, the most              over batches
sequence  tokens of a row that fit and keep the limit, the most      over sequence lengths
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpsearch.aim.narrow import OnePass
from hpsearch.aim.price import Tariff
from hpsearch.aim.vary import worst
from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError
from hpsearch.space import Space

DIMENSIONS = {
    "time": "", "robust": "", "rate": "devices", "cost": "devices", "energy": "devices", "devices": "devices",
    "batch": "global_batch", "sequence": "seq_len",
}  # fmt: skip
"""Objective → what it varies."""
UNLIMITED = float("inf")


@dataclass(frozen=True)
class Aim:
    """`space`: the question, but for the dimension that varies; `over`: the values that it may have."""

    kind: str
    space: Space
    over: tuple[int, ...] = ()
    clusters: Mapping[int, Cluster] = field(default_factory=dict)
    """Of each device count; where devices vary."""
    most_step_s: float = UNLIMITED
    least_tokens_per_s: float = 0.0
    tariff: Tariff | None = None
    """What a device costs; for cost and energy."""
    imbalance: float = 1.0
    """Of experts at worst: tokens of the fullest rank over the average; for robust."""

    def __post_init__(self) -> None:
        if self.kind not in DIMENSIONS:
            raise LegalityError(f"objective {self.kind!r}", f"expected one of {', '.join(DIMENSIONS)}", "")
        if self.kind == "devices" and not self.is_limited:
            raise LegalityError(
                "objective devices", "expected a deadline, because one device is the least for any step, but got none",
                "Give --step-below SECONDS or --tokens-per-second RATE.",
            )  # fmt: skip
        if self.kind in ("cost", "energy") and self.tariff is None:
            raise LegalityError(f"objective {self.kind}", "expected what a device costs, but got nothing", "")
        longest = self.space.shape.positions
        if self.kind == "sequence" and longest and max(self.over) > longest:
            raise LegalityError(
                "objective sequence", f"expected at most the {longest} positions that {self.space.shape.name} has "
                f"learned, but got {max(self.over)}", f"State lengths up to {longest}.",
            )  # fmt: skip

    @property
    def dimension(self) -> str:
        """devices, global_batch, seq_len, or none."""
        return DIMENSIONS[self.kind]

    @property
    def is_limited(self) -> bool:
        return self.most_step_s < UNLIMITED or self.least_tokens_per_s > 0

    @property
    def values(self) -> tuple[int, ...]:
        """Of the dimension that varies; the one device count where none does."""
        return tuple(sorted(set(self.over))) if self.dimension else (self.space.devices,)

    def at(self, value: int) -> Space:
        """The question with this value of the dimension that varies.

        Micro-batches add up: without a limit any batch would fit. So the largest batch is then one of one pass.
        """
        if self.kind == "robust":
            return worst(self.space, imbalance=self.imbalance)
        if self.dimension == "devices":
            return replace(self.space, cluster=self.clusters[value])
        if self.dimension:
            told: dict[str, Any] = {self.dimension: value}
            found = replace(self.space, base=replace(self.space.base, **told))
            return found if self.is_limited or self.kind != "batch" else OnePass.of(found)
        return self.space

    def limit_s(self, value: int) -> float:
        """Seconds that a step may take."""
        space = self.at(value)
        if not self.least_tokens_per_s:
            return self.most_step_s
        return min(self.most_step_s, space.global_batch * space.base.seq_len / self.least_tokens_per_s)

    def score(self, value: int, step_s: float) -> float:
        """What is made small; grows with `step_s`, or does not depend on it."""
        if not self.dimension:
            return step_s
        if self.kind == "rate":
            return value * step_s
        if self.kind in ("cost", "energy"):
            assert self.tariff is not None
            return self.tariff.a_second * value * step_s
        return float(value if self.kind == "devices" else -value)

    def worth_s(self, value: int, score: float) -> float:
        """Seconds from which on a step with this value breaks the limit, or is no better than `score`."""
        if not self.dimension:
            return min(self.limit_s(value), score)
        unit = self.score(value, 1.0)
        varies = unit != self.score(value, 2.0)
        return min(self.limit_s(value), score / unit) if varies else self.limit_s(value)
