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


def tariff_of(kind: str, stated: str | None, cluster: Cluster) -> Tariff:
    """What a device costs (`cost`) or draws (`energy`), as stated or as the cluster file says.

    LegalityError: stated in another way, or not at all.
    """
    if stated is not None:
        found = (_MONEY if kind == "cost" else _POWER).fullmatch(stated)
        example = "'2.5 USD/h'" if kind == "cost" else "'700 W'"
        if found is None:
            raise LegalityError(
                "--price", f"expected a {'price' if kind == 'cost' else 'power'} of one device as {example}, but got "
                f"{stated!r}", f"Write --price {example}.",
            )  # fmt: skip
        value, unit = float(found[1]), found[2]
        if kind == "cost":
            return Tariff(value / HOUR_S, unit, "stated")
        return Tariff(value * (1000.0 if unit == "kW" else 1.0), "J", "stated")
    raise LegalityError(
        f"objective {kind}", f"expected the {'price' if kind == 'cost' else 'power'} of a device of {cluster.name}, "
        "but nobody states one", "Give --price.",
    )  # fmt: skip
