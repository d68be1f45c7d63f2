"""The names the field has for where a Shard lands: DDP, ZeRO, FSDP, tensor and sequence parallel. Words only.

Nothing decides by these names; they are read off the layouts so that people recognise what they know.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from hpsearch.layout import DATA_AXES, Layout
from hpsearch.layout.mesh import MeshAxis
from hpsearch.plan.plan import Plan
from hpsearch.plan.schema import ParamEntry

AXIS_WORDS = {
    "dp_replicate": "data parallel, parameters replicated",
    "dp_shard": "data parallel, parameters may be sharded",
    "ep": "data parallel, experts spread",
    "cp": "context parallel",
    "tp": "tensor parallel",
}


def data_parallel_name(entry: ParamEntry, axes: tuple[MeshAxis, ...]) -> str:
    """How a parameter lives on the data axes: DDP, ZeRO-1, ZeRO-2, FSDP (ZeRO-3), with HSDP where it is both."""
    data = [axis.name for axis in axes if axis.name in DATA_AXES]
    if not data:
        return "no data parallelism"
    stored, used = Layout.parse(entry.stored), Layout.parse(entry.used)
    cut = [axis for axis in data if stored[axis].is_shard and not used[axis].is_shard]
    if not cut:
        return "DDP" if entry.trainable else "replicated, frozen"
    if entry.residency == "micro_batch":
        name = "FSDP (ZeRO-3)"
    else:
        name = "ZeRO-2" if entry.reduce == "micro_batch" else "ZeRO-1"
    return f"{name} inside replicas (HSDP)" if len(cut) < len(data) else name


def tensor_parallel_name(entry: ParamEntry, entries: tuple[ParamEntry, ...]) -> str:
    """How a parameter is cut for use on the tp axis.

    Of a linear, a bias tells which side is cut: it goes with the outputs. Without one, torch's (out, in) order does.
    """
    placement = Layout.parse(entry.used)["tp"]
    if not placement.is_shard:
        return "replicated"
    if len(entry.shape) != 2 or not entry.local.endswith("weight"):
        return f"cut on dim {placement.dim}"
    siblings = {e.local: e for e in entries if e.graph == entry.graph}
    bias = siblings.get(entry.local.removesuffix("weight") + "bias")
    by_outputs = placement.dim == 0 if bias is None else Layout.parse(bias.used)["tp"].is_shard
    return f"{'column' if by_outputs else 'row'} parallel (dim {placement.dim})"


def parameter_shares(plan: Plan) -> list[tuple[str, float]]:
    """How much of the model's elements lives by each data-parallel name, the largest share first."""
    shares: Counter[str] = Counter()
    for entry in plan.file.parameters:
        shares[data_parallel_name(entry, plan.mesh.axes)] += prod(entry.shape) * entry.count
    total = shares.total() or 1
    return [(name, count / total) for name, count in shares.most_common()]


def share_cut_over_tp(plan: Plan) -> float:
    """How much of the model's elements is used in pieces over tp."""
    sizes = [(prod(p.shape) * p.count, Layout.parse(p.used)["tp"].is_shard) for p in plan.file.parameters]
    return sum(count for count, cut in sizes if cut) / (sum(count for count, _ in sizes) or 1)


def activations_cut_over_tp(plan: Plan) -> list[tuple[str, str]]:
    """Block classes whose activations arrive cut over tp, with the placement: `LlamaDecoderLayer`, `S1`."""
    found = []
    blocks = dict.fromkeys(entry.graph for entry in plan.file.parameters if entry.graph != "outer")
    for block in blocks:
        params = {_placeholder(entry.local) for entry in plan.file.parameters if entry.graph == block}
        placed = plan.file.placements.get(block, {})
        arrivals = [
            rules["tp"].removeprefix("->")
            for name, rules in placed.items()
            if name not in params and not name.startswith("tangent_") and rules.get("tp", "").startswith("->S")
        ]
        if arrivals:
            found.append((block, min(arrivals)))
    return found


def _placeholder(local: str) -> str:
    """How a captured graph calls the placeholder of a parameter."""
    return "".join(char if char.isalnum() else "_" for char in local)
