"""Why nothing fits: the least memory found, what fills it, and what would make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, optimizer_states
from hpsearch.errors import InfeasibleError, counted
from hpsearch.graph import ITEM_BYTES, ModelGraph
from hpsearch.plan import Refusal
from hpsearch.search.fix import Fix
from hpsearch.search.memory import RESERVE, usable_bytes
from hpsearch.search.pins import offered
from hpsearch.search.step_memory import fullest
from hpsearch.solve import least


def why_infeasible(
    model: ModelGraph,
    cluster: Cluster,
    tightest: Sequence[CostTable],
    fix: Fix,
    refused: list[Refusal],
    beside: Sequence[str],
    fits_without: Callable[[], bool],
) -> InfeasibleError:
    """The error to raise when no candidate fits.

    tightest: the candidates whose parts need least memory. beside: what else was looked at, in words. fits_without:
    whether a plan exists without the pins.
    """
    subject = f"{model.name} ({model.num_params / 1e9:.2f}e9 parameters) on {cluster.devices} x {cluster.device.name}"
    pins = f" with the pins {', '.join(f'{k}={v}' for k, v in fix.text.items())}" if fix.text else ""
    if not tightest:
        reasons = "; ".join(f"{r.candidate}: {r.reason}" for r in refused[:3])
        return InfeasibleError(subject, f"no candidate is left{pins} ({reasons})", "Loosen --fix.")
    found = min((f for f in map(_least, tightest) if f is not None), key=lambda f: f[0], default=None)
    if found is None:
        problem = f"no layout satisfies the pins{pins.removeprefix(' with the pins')}"
        return InfeasibleError(subject, problem, f"{offered(tightest[0], fix)}. Drop or change one.".lstrip(". "))
    total, filled, nearest = found
    parts = ", ".join(f"{name} {n / 1e9:.1f} GB" for name, n in sorted(filled.items(), key=lambda x: -x[1]) if n)
    limit, weights, state_bytes = usable_bytes(cluster), _weight_bytes(model), _state_bytes(nearest)
    problem = (
        f"expected a plan within {limit / 1e9:.1f} GB a device ({1 - RESERVE:.0%} of its memory), but the least "
        f"found{pins} is {total / 1e9:.1f} GB ({_label(nearest)}): {parts}. "
        f"Weights alone are {weights / 1e9:.1f} GB in {nearest.job.recipe.compute}; "
        f"parameters, gradients and optimizer state are {state_bytes / 1e9:.0f} GB together"
    )
    if beside:
        problem += f". Tried as well, and none fits: {'; '.join(beside)}"
    devices = -(-state_bytes // limit)
    enough = math.ceil(total / (1 - RESERVE) / 2**30 * 10) / 10
    remedy = (
        f"At least {counted(devices, 'such device')}{_in_whole_nodes(devices, cluster)} hold that state before any "
        f"activation; a device memory of {enough:.1f} GiB would be enough here. Use more devices, or a smaller "
        "global batch or sequence."
    )
    if fix.text:
        remedy += " Without the pins it fits." if fits_without() else " Without the pins it does not fit either."
    return InfeasibleError(subject, problem, remedy)


def _least(table: CostTable) -> tuple[int, dict[str, int], CostTable] | None:
    """Bytes a device of the choice with the smallest parts, at its fullest moment; None when the pins forbid all."""
    solution = least(table.problem, "memory")
    if solution.choice is None:
        return None
    filled = fullest(table, solution.choice)
    return sum(filled.values()), filled, table


def _in_whole_nodes(devices: int, cluster: Cluster) -> str:
    node = cluster.tiers[0]
    whole = -(-devices // node.size) * node.size
    return f" ({whole} in whole {node.name}s of {node.size})" if whole != devices else ""


def _weight_bytes(model: ModelGraph) -> int:
    return sum(_elements(p.shape) * ITEM_BYTES[p.dtype] for p in model.params.values())


def _label(table: CostTable) -> str:
    away = [word for word, on in (("activations", table.job.offload), ("optimizer", table.job.states_on_host)) if on]
    told = [*(["recompute"] if table.job.recompute else []), *(f"{word} on the host" for word in away)]
    more = f" with {' and '.join(told)}" if told else ""
    return f"{table.mesh}, {counted(table.job.micro_batches, 'micro-batch')}{more}"


def _state_bytes(table: CostTable) -> int:
    """Bytes of parameters, gradients and optimizer state of the whole model, stored once."""
    recipe, states = table.job.recipe, 0
    for param in table.space.model.params.values():
        each = ITEM_BYTES[recipe.master]
        if param.trainable:
            from_optimizer = ITEM_BYTES[recipe.master] * optimizer_states(table.job.optimizer)
            each += ITEM_BYTES[recipe.reduce] + from_optimizer
        states += _elements(param.shape) * each
    return states


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
