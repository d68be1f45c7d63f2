"""Blocks of a captured model as the parts that are priced as units: attention, feed-forward, routed experts, scans.

Nothing is known by module names: regions come from the ops, and what a linear is for from how tensor parallelism would
cut it (`cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from hpsearch.estimate.cuts import find_cuts, sides
from hpsearch.estimate.regions import CoreRegion, ExpertRegion, Graph, ScanRegion, copies, cores, experts, scan
from hpsearch.estimate.units import ROW, Core, Experts, Linear, Scan
from hpsearch.graph import Op, OpGraph

Unit = Linear | Core | Experts | Scan


@dataclass(frozen=True)
class Anatomy:
    """The units of one forward, and the linears around them."""

    width: int
    """Features of the stream."""
    seq_len: int
    units: tuple[Unit, ...]
    """In the order in which they run."""
    params: dict[str, tuple[int, ...]]
    """Shapes by local name."""
    causal: bool
    window: int
    windowed: int

    def segments(self) -> Iterator[tuple[Unit, ...]]:
        """Units up to and with each row-parallel linear, and what comes after the last."""
        found: list[Unit] = []
        for unit in self.units:
            found.append(unit)
            if isinstance(unit, Linear) and unit.cut == ROW:
                yield tuple(found)
                found = []
        if found:
            yield tuple(found)

    @property
    def cores(self) -> tuple[Core, ...]:
        return tuple(unit for unit in self.units if isinstance(unit, Core))

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for shape in self.params.values())


def dissect(piece: OpGraph, ops: Sequence[Op] | None = None) -> Anatomy:
    """The units of a block's forward, or of some of its ops."""
    graph = Graph(piece, tuple(op for op in (piece.ops if ops is None else ops) if op.phase == "forward"))
    routed, scanned = experts(graph), scan(graph)
    aside = (routed.inside if routed else frozenset()) | (scanned.inside if scanned else frozenset())
    found = cores(graph, aside)
    cuts = find_cuts(graph, routed.inside if routed else frozenset(), scanned)
    position = {op.name: i for i, op in enumerate(graph.ops)}
    units: list[tuple[int, Unit]] = [
        (position[op.name], Linear(rows, n, k, cut, _routes(graph, op)))
        for op, rows, n, k, cut in sides(graph, cuts)
        if op.name not in aside
    ]
    inner = set(cuts.dims)
    units += [(position[region.last.name], _core(graph, region, inner)) for region in found]
    if routed:
        units.append((position[routed.products[-1].name], _experts(graph, routed)))
    if scanned:
        units.append((position[scanned.end.name] - 1, _scan(graph, scanned)))
    stream = piece.values[piece.outputs[0]].fixed
    return Anatomy(
        width=stream[-1] if stream else 0,
        seq_len=stream[1] if len(stream) == 3 else 1,
        units=tuple(unit for _, unit in sorted(units, key=lambda pair: pair[0])),
        params={name: piece.values[value].fixed for name, value in piece.params.items()},
        causal=piece.causal,
        window=piece.window,
        windowed=piece.windowed,
    )


def _core(graph: Graph, region: CoreRegion, inner: set[str]) -> Core:
    q, k, v = region.operands
    made = region.result in inner
    if region.first is region.last:
        _, heads, queries, width = graph.piece.values[q].fixed
        _, kv_heads, keys, _ = graph.piece.values[k].fixed
        v_width = graph.piece.values[v].fixed[-1]
        kv_heads = round(kv_heads / copies(graph, k))
    else:
        queries, keys = graph.piece.values[region.first.outputs[0]].fixed[-2:]
        heads = round(graph.elements(region.first.outputs[0]) / (queries * keys))
        width = round(graph.elements(q) / (heads * queries))
        v_width = round(graph.elements(region.result) / (heads * queries))
        kv_heads = round(heads / copies(graph, k))
    return Core(heads, kv_heads, queries, keys, width, v_width, queries == keys, made)


def _routes(graph: Graph, op: Op) -> bool:
    """Whether the result of a product decides where tokens go: a top-k follows before the next product."""
    made = set(op.outputs)
    for step in graph.ops:
        if made.intersection(step.inputs) and step.kind != "matmul":
            if "topk" in step.target:
                return True
            made.update(step.outputs)
    return False


def _experts(graph: Graph, region: ExpertRegion) -> Experts:
    values = graph.piece.values
    shapes = [values[graph.param_of(weight) or weight].fixed for weight in region.weights]
    count, first, last = shapes[0][0], region.products[0], region.products[-1]
    width, ffn = values[last.outputs[0]].fixed[-1], values[last.inputs[0]].fixed[-1]
    up = values[first.outputs[0]].fixed[-1] if len(region.products) == 2 else 2 * ffn
    chosen = [op for op in graph.ops if "topk" in op.target]
    top_k = values[chosen[-1].outputs[0]].fixed[-1] if chosen else 1
    tokens = graph.elements(chosen[-1].outputs[0]) / top_k if chosen else 0.0
    bias = any(len(values[v].fixed) == 2 and values[v].fixed[0] == count for v in _params_in(graph, region))
    return Experts(count, top_k, tokens, width, ffn, up == 2 * ffn, bias, *_limits(graph, chosen, count))


def _limits(graph: Graph, chosen: Sequence[Op], experts: int) -> tuple[int, int]:
    """(groups of experts, of how many of them a token's may be). A router that is limited ranks the groups by a score
    each, in front of the experts: a top-k over as many numbers a token as there are groups."""
    values = graph.piece.values
    for op in chosen[:-1]:
        scores, best = values[op.inputs[0]].fixed, values[op.outputs[0]].fixed[-1]
        same_form = len(scores) == len(values[chosen[-1].inputs[0]].fixed)
        if same_form and 1 < scores[-1] < experts and experts % scores[-1] == 0 and best < scores[-1]:
            return scores[-1], best
    return 1, 1


def _params_in(graph: Graph, region: ExpertRegion) -> Sequence[str]:
    return [
        v for op in graph.ops if op.name in region.inside for v in op.inputs if graph.piece.values[v].role == "param"
    ]


def _scan(graph: Graph, region: ScanRegion) -> Scan:
    values, params = graph.piece.values, graph.piece.params
    rows = graph.elements(region.end.outputs[0]) / values[region.end.outputs[0]].fixed[-1]
    inner = values[region.end.inputs[0]].fixed[-1]
    conv = next(
        (values[v].fixed[0] for name, v in params.items() if name.startswith(region.module) and "conv" in name), 0
    )
    known = [op for op in graph.ops if op.name in region.inside and op.kind == "attention"]
    flops = float(sum(sum(op.flops) for op in known)) if known else None
    heads = next(values[v].fixed[0] for name, v in params.items() if name.endswith("A_log"))
    return Scan(rows, inner, max((conv - inner) // 2, 0), _state(graph, region, (conv - inner) // 2), flops, heads)


def _state(graph: Graph, region: ScanRegion, states: int) -> int:
    """Size of one group's state: the last dim of the view that sets the groups apart."""
    for op in graph.ops:
        if op.name in region.inside and op.kind == "view":
            shape = graph.piece.values[op.outputs[0]].fixed
            if len(shape) == 4 and shape[2] * shape[3] == states and shape[2] != states:
                return shape[3]
    return states
