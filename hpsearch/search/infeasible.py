"""Why nothing fits: the least memory found, what fills it, and what would make it fit."""

from __future__ import annotations

from hpsearch.cluster import Cluster
from hpsearch.cost import CostTable, optimizer_states
from hpsearch.errors import InfeasibleError
from hpsearch.graph import ITEM_BYTES, ModelGraph
from hpsearch.plan import Refusal
from hpsearch.search.fix import Fix
from hpsearch.search.memory import bytes_by_category, usable_bytes
from hpsearch.solve import least


def why_infeasible(
    model: ModelGraph, cluster: Cluster, nearest: CostTable | None, fix: Fix, refused: list[Refusal]
) -> InfeasibleError:
    """The error to raise when no candidate fits."""
    limit = usable_bytes(cluster)
    subject = f"{model.name} ({model.num_params / 1e9:.2f}e9 parameters) on {cluster.devices} x {cluster.device.name}"
    if nearest is None:
        reasons = "; ".join(f"{r.candidate}: {r.reason}" for r in refused[:3])
        return InfeasibleError(subject, f"no candidate is left ({reasons})", "Loosen --fix.")
    solution = least(nearest.problem, "memory")
    if solution.choice is None:
        pins = ", ".join(f"{k}={v}" for k, v in fix.text.items())
        return InfeasibleError(subject, f"no layout satisfies the pins {pins}", "Loosen --fix.")
    filled = bytes_by_category(nearest, solution.choice)
    total = sum(filled.values())
    parts = ", ".join(f"{name} {n / 1e9:.1f} GB" for name, n in sorted(filled.items(), key=lambda x: -x[1]) if n)
    weights = sum(_elements(p.shape) * ITEM_BYTES[p.dtype] for p in model.params.values())
    state_bytes = _state_bytes(nearest)
    devices = -(-state_bytes // limit)
    pins = f" with the pins {', '.join(f'{k}={v}' for k, v in fix.text.items())}" if fix.text else ""
    problem = (
        f"expected a plan within {limit / 1e9:.1f} GB a device, but the least found{pins} is {total / 1e9:.1f} GB "
        f"({_label(nearest)}): {parts}. Weights alone are {weights / 1e9:.1f} GB in {nearest.job.recipe.compute}; "
        f"parameters, gradients and optimizer state are {state_bytes / 1e9:.0f} GB together"
    )
    remedy = f"At least {devices} such devices hold that state before any activation; "
    remedy += f"a limit of {total / 2**30:.1f} GiB a device would fit here. Use more devices, a smaller global batch"
    remedy += " or sequence, or drop pins." if fix.text else " or sequence."
    return InfeasibleError(subject, problem, remedy)


def _label(table: CostTable) -> str:
    again = " with recompute" if table.job.recompute else ""
    return f"{table.mesh}, {table.job.micro_batches} micro-batches{again}"


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
