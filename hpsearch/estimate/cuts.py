"""Which tensors tensor parallelism cuts: column-parallel linears, what follows them, and the linears that end the cut.

Every linear that reads the stream is taken for column-parallel; the cut then follows the sharding rules of the ops
after it. Where an op has no rule that keeps it (a norm over the cut features, a top-k over experts, the residual sum),
the linears it came from are not cut, and the walk begins anew. What remains is the scheme of Megatron-LM
(arXiv 1909.08053) for whatever blocks it fits, found instead of listed by module names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from hpsearch.errors import InternalError
from hpsearch.estimate.regions import Graph, ScanRegion, is_product, linear_sides
from hpsearch.estimate.units import COLUMN, ROW, WHOLE
from hpsearch.graph import Op, Rule

SEGMENTED = ("split", "chunk", "slice", "unbind")
"""Cutting a fused projection in segments cuts each of them."""


@dataclass
class Cuts:
    dims: dict[str, int] = field(default_factory=dict)
    """Inner values, with the dim that is cut."""
    linears: dict[str, str] = field(default_factory=dict)
    """How each linear is cut, by name of the op."""


@dataclass
class _Broken(Exception):
    sources: frozenset[str]


def find_cuts(graph: Graph, outside: frozenset[str], scan: ScanRegion | None) -> Cuts:
    """`outside`: ops that tp leaves to somebody else (routed experts)."""
    whole: set[str] = set()
    while True:
        try:
            return _Walk(graph, outside, scan, frozenset(whole)).run()
        except _Broken as broken:
            if broken.sources <= whole:
                raise InternalError(graph.piece.name, "a cut that no linear made cannot be followed") from broken
            whole |= broken.sources


@dataclass
class _Walk:
    graph: Graph
    outside: frozenset[str]
    scan: ScanRegion | None
    whole: frozenset[str]
    cuts: Cuts = field(default_factory=Cuts)
    sources: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of every inner value: the column-parallel linears it came from."""

    def run(self) -> Cuts:
        scanned = self.scan.inside if self.scan else frozenset()
        for op in self.graph.ops:
            if op.name in scanned or op.name in self.outside:
                continue
            if self.scan and op.name in {e.name for e in self.scan.entries}:
                self.cuts.linears[op.name] = COLUMN
                self.inner(op, op.outputs, (len(self.graph.piece.values[op.outputs[0]].fixed) - 1,), frozenset())
            elif self.scan and op.name == self.scan.end.name:
                self.cuts.linears[op.name] = ROW
            else:
                self.visit(op)
        ends = [v for v in self.graph.piece.outputs if v in self.cuts.dims]
        if ends:
            raise _Broken(frozenset().union(*(self.sources[v] for v in ends)))
        return self.cuts

    def visit(self, op: Op) -> None:
        linear = op.kind == "matmul" and linear_sides(self.graph, op) is not None
        cut = [v for v in op.inputs if v in self.cuts.dims]
        if not cut:
            if linear:
                column = op.name not in self.whole
                self.cuts.linears[op.name] = COLUMN if column else WHOLE
                if column:
                    last = len(self.graph.piece.values[op.outputs[0]].fixed) - 1
                    self.inner(op, op.outputs, (last,), frozenset({op.name}))
            return
        found = next(self.outcomes(op), None)
        if found is None or ("P" in found and not linear):
            raise _Broken(self.blamed(op, cut))
        if "P" in found:
            self.cuts.linears[op.name] = ROW
            return
        if linear:
            self.cuts.linears[op.name] = WHOLE
        sources = frozenset().union(*(self.sources[v] for v in cut))
        self.inner(op, op.outputs, tuple(int(p[1:]) if p != "R" else -1 for p in found), sources)

    def blamed(self, op: Op, cut: list[str]) -> frozenset[str]:
        """The linears that must be whole for `op` to go on: those of one input, the smallest first, where that is
        enough (keys and values of a single head beside cut queries), else those of all."""
        for value in sorted(cut, key=self.graph.elements):
            dim = self.cuts.dims.pop(value)
            works = len(cut) > 1 and next((made for made in self.outcomes(op) if "P" not in made), None) is not None
            self.cuts.dims[value] = dim
            if works:
                return self.sources[value]
        return frozenset().union(*(self.sources[v] for v in cut))

    def inner(self, op: Op, outputs: tuple[str, ...], dims: tuple[int, ...], sources: frozenset[str]) -> None:
        for value, dim in zip(outputs, dims, strict=True):
            if dim >= 0:
                self.cuts.dims[value] = dim
                self.sources[value] = sources

    def outcomes(self, op: Op) -> Iterator[tuple[str, ...]]:
        """Placements of the outputs under each rule that takes the inputs as they are; whole inputs may be sliced."""
        if op.kind == "view" and any(word in op.target for word in SEGMENTED):
            segments = self.segmented(op)
            if segments is not None:
                yield segments
        merged = op.kind == "view" and self.cuts.dims.get(op.inputs[0]) == 0
        if merged and (local := self.local_view(op)) is not None:
            yield local
        rules: list[Rule] = sorted(self.graph.piece.rules_of(op), key=lambda rule: sum(p == "R" for p in rule[1]))
        for given, made in rules:
            if all(self.takes(value, p) for value, p in zip(op.inputs, given, strict=True)) and "P" not in made:
                yield made
        for given, made in rules:
            if all(self.takes(value, p) for value, p in zip(op.inputs, given, strict=True)):
                yield made
        if op.kind == "attention" and self.shares_keys(op):
            yield ("S1",) * len(op.outputs)
        if op.kind == "view" and not merged and (local := self.local_view(op)) is not None:
            yield local

    def shares_keys(self, op: Op) -> bool:
        """Whether heads of queries are cut and one head of keys and values serves all of them, on every rank."""
        query, *others = op.inputs[:3]
        whole = all(v not in self.cuts.dims and self.graph.piece.values[v].fixed[1] == 1 for v in others)
        return whole and self.cuts.dims.get(query) == 1

    def takes(self, value: str, placement: str) -> bool:
        dim = self.cuts.dims.get(value)
        return placement[0] in "RS" if dim is None else placement == f"S{dim}"

    def segmented(self, op: Op) -> tuple[str, ...] | None:
        values = self.graph.piece.values
        before, dim = values[op.inputs[0]].fixed, self.cuts.dims[op.inputs[0]]
        outs = [values[v].fixed for v in op.outputs]
        if any(len(out) != len(before) or out[dim] == before[dim] for out in outs):
            return None
        return (f"S{dim}",) * len(outs)

    def local_view(self, op: Op) -> tuple[str, ...] | None:
        """Batch and a cut dim made one, or apart again: no sharding of the global tensor, but a view of local ones."""
        values = self.graph.piece.values
        before, after = values[op.inputs[0]], values[op.outputs[0]]
        dim = self.cuts.dims[op.inputs[0]]
        if not before.per_row[:1] or not after.per_row[:1]:
            return None
        if dim and before.per_row[0] * prod(before.fixed[1 : dim + 1]) <= after.per_row[0]:
            return ("S0",)
        if dim == 0 and after.per_row[0] < before.per_row[0]:
            return ("S1",)
        return None


def sides(graph: Graph, cuts: Cuts) -> Iterator[tuple[Op, float, int, int, str]]:
    """(op, rows, n, k, cut) of every linear outside the routed experts."""
    for op in graph.ops:
        found = linear_sides(graph, op) if is_product(op) else None
        if found is not None:
            yield op, *found, cuts.linears.get(op.name, WHOLE)
