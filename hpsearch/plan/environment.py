"""Variables of a launch on which the overlap of a plan rests.

CUDA hands kernels to a device through `CUDA_DEVICE_MAX_CONNECTIONS` queues, 8 unless set, at most 32 (CUDA C++
Programming Guide, environment variables). With 1, as some tensor-parallel overlap wants it, a gather or a reduction
waits for the compute issued before it, and what the plan hides is exposed
(https://github.com/pytorch/torchtitan/issues/1147).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpsearch.cluster import Tier
from hpsearch.plan.schema import CollectiveEntry, PlanFile

QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8 to 32"}


def environment_of(collectives: Iterable[CollectiveEntry], tiers: tuple[Tier, ...]) -> dict[str, str]:
    """What a launch may set the variables to: on CUDA devices, if anything is to run beside compute."""
    hidden = any(c.phase in ("gather", "reduce") for c in collectives)
    return dict(QUEUES) if hidden and any(tier.link.startswith("nvlink") for tier in tiers) else {}


def unmet(file: PlanFile, environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that stands otherwise than the plan needs; unset ones are as they should be."""
    found = []
    for name, allowed in sorted(file.environment.items()):
        low, high = map(int, re.findall(r"\d+", allowed))
        value = environ.get(name)
        if value is not None and not (value.isdecimal() and low <= int(value) <= high):
            p = file.predicted
            found.append(
                f"{name} is {value}, but the plan hides communication under compute, for which it has to be unset or "
                f"{allowed}; without overlap its step is {p.compute_s + p.communication_s:.4g} s instead of "
                f"{p.step_s:.4g} s. Unset it."
            )
    return tuple(found)
