"""`Tariff`: what a device takes a second, in money or energy, and who says so. Never made up: stated, or refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpsearch.cluster import Cluster
from hpsearch.errors import LegalityError

MEASURES = ("cost", "energy")
HOUR_S = 3600.0
_MONEY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]{3})/h\s*")
_POWER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k?W)\s*")


@dataclass(frozen=True)
class Tariff:
    a_second: float
    """Of one device, whether it works or stands idle."""
    unit: str
    """A currency; or J."""
    source: str

    def __str__(self) -> str:
        if self.unit == "J":
            return f"at {self.a_second:.4g} W a device ({self.source})"
        return f"at {self.a_second * HOUR_S:.4g} {self.unit}/h a device ({self.source})"


def tariff_of(kind: str, stated: str | None, cluster: Cluster) -> Tariff:
    """What a device costs (`cost`) or draws (`energy`), as stated or as the cluster file says.

    LegalityError: stated in another way, or not at all.
    """
    example = "'2.5 USD/h'" if kind == "cost" else "'700 W'"
    if stated is not None:
        found = (_MONEY if kind == "cost" else _POWER).fullmatch(stated)
        if found is None:
            raise LegalityError(
                "--price", f"expected a {'price' if kind == 'cost' else 'power'} of one device as {example}, but got "
                f"{stated!r}", f"Write --price {example}.",
            )  # fmt: skip
        value, unit = float(found[1]), found[2]
        if kind == "cost":
            return Tariff(value / HOUR_S, unit, "stated")
        return Tariff(value * (1000.0 if unit == "kW" else 1.0), "J", "stated")
    device, name = cluster.device, "price" if kind == "cost" else "power"
    source = next((fact.source for fact in cluster.facts if fact.path == f"device.{name}"), "the cluster")
    if kind == "cost" and device.price_a_second is not None:
        return Tariff(device.price_a_second, device.currency, source)
    if kind == "energy" and device.power_w is not None:
        return Tariff(device.power_w, "J", source)
    raise LegalityError(
        f"objective {kind}", f"expected the {name} of a {device.name}, but {cluster.name} states none",
        f"Give --price {example}, or add {name} under [device] of the cluster file, with its source.",
    )  # fmt: skip
