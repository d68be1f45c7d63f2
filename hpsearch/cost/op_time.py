"""Seconds of every op in every state, on the pieces one device holds.

What runs is priced: the emitted program executes op by op, so an elementwise op reads and writes its operands. A view
is free. Matmuls go by measured efficiency over (m, n, k); attention by FLOPs; everything else by bytes moved.
Shapes are collected first and priced in one call for each formula: a search prices thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from hpsearch.cluster import Cluster
from hpsearch.graph import ITEM_BYTES, Call, Op, OpGraph, Rule, Value
from hpsearch.graph.scaled import FORWARD, scaled_products
from hpsearch.layout import Mesh, Placement
from hpsearch.strategy import Node, SearchSpace

Floats = npt.NDArray[np.float64]
NodeKey = tuple[str, str]


@dataclass
class _Batch:
    """Arguments of one formula, collected from many states, and where each result belongs."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    places: list[tuple[NodeKey, int]] = field(default_factory=list)

    def add(self, key: NodeKey, state: int, *row: float) -> None:
        self.rows.append(row)
        self.places.append((key, state))

    def price(self, formula: Callable[..., Floats], into: dict[NodeKey, Floats]) -> None:
        if self.rows:
            seconds = formula(*np.array(self.rows, dtype=np.float64).T)
            for (key, state), value in zip(self.places, np.asarray(seconds).tolist(), strict=True):
                into[key][state] += value


def local_elements(value: Value, rows: int, cuts: Iterable[tuple[int, Placement]]) -> int:
    """Elements of a value on one device; `rows` of one micro-batch on all ranks; `cuts`: (pieces, placement)."""
    count = prod(value.shape(rows))
    for pieces, placement in cuts:
        if placement.is_shard:
            count //= pieces
    return count


def op_seconds(space: SearchSpace, cluster: Cluster, rows: int, mesh: Mesh) -> dict[NodeKey, Floats]:
    """Seconds of one execution of each op node, by state; `rows` of one micro-batch on all ranks."""
    found: dict[NodeKey, Floats] = {}
    matmuls: dict[str, _Batch] = {}
    attentions: dict[str, _Batch] = {}
    moved = _Batch()
    scaled = {name: scaled_products(space.model, graph) for name, graph in space.graphs.items()}
    for key, node in space.nodes.items():
        if node.kind != "op":
            continue
        found[key] = np.zeros(len(node.rules))
        graph = space.graphs[key[0]]
        op = graph.step(key[1])
        if isinstance(op, Call) or op.kind == "view":
            continue
        for state in range(len(node.rules)):
            local = _LocalOp(space, graph, op, node, state, rows, mesh)
            dtype = local.dtype
            if op.name in scaled[key[0]]:
                matmuls.setdefault(FORWARD, _Batch()).add(key, state, *local.gemm())
                moved.add(key, state, local.rounded_bytes())
            elif op.kind == "matmul":
                matmuls.setdefault(dtype, _Batch()).add(key, state, *local.gemm())
            elif op.kind in ("attention", "conv"):
                attentions.setdefault(dtype, _Batch()).add(key, state, local.flops(), local.bytes_moved())
            else:
                moved.add(key, state, local.bytes_moved())
    for dtype, batch in sorted(matmuls.items()):
        batch.price(lambda m, n, k, b, dtype=dtype: cluster.matmul_s(m, n, k, dtype, batch=b), found)
    for dtype, batch in sorted(attentions.items()):
        batch.price(lambda flops, nbytes, dtype=dtype: cluster.attention_s(flops, nbytes, dtype), found)
    moved.price(cluster.memory_bound_s, found)
    return found


@dataclass
class _LocalOp:
    """One op in one state on one device."""

    space: SearchSpace
    graph: OpGraph
    op: Op
    node: Node
    state: int
    rows: int
    mesh: Mesh

    @property
    def dtype(self) -> str:
        return self.graph.values[self.op.outputs[0]].dtype

    @cached_property
    def _rules(self) -> list[tuple[str, int, Rule]]:
        """(role, pieces, rule) of every role of axes, the free one last."""
        placed = [
            (role, size, self.space.followed[role][self.graph.name].rules[self.op.name])
            for role, size in self.mesh.followed.items()
        ]
        return [*placed, ("free", self.space.tp, self.node.rules[self.state])]

    @cached_property
    def _placed(self) -> list[tuple[Value, tuple[tuple[int, Placement], ...]]]:
        """(value, its cuts) of every tensor that is read or written."""
        names = self.op.inputs + self.op.outputs
        columns = [[(size, Placement.parse(text)) for text in rule[0] + rule[1]] for _, size, rule in self._rules]
        cuts: Iterable[tuple[tuple[int, Placement], ...]] = zip(*columns, strict=True)
        return [(self.graph.values[name], each) for name, each in zip(names, cuts, strict=True)]

    def bytes_moved(self) -> int:
        return sum(local_elements(value, self.rows, cuts) * ITEM_BYTES[value.dtype] for value, cuts in self._placed)

    def rounded_bytes(self) -> int:
        """Of a product in 8 bits: both operands are read for their largest elements, read again, and written."""
        operands = self._placed[: len(self.op.inputs)]
        return sum(local_elements(v, self.rows, cuts) * (2 * ITEM_BYTES[v.dtype] + 1) for v, cuts in operands)

    def flops(self) -> float:
        """FLOPs of the whole op over the ways it is split; a rule without a cut computes all of it."""
        fixed, per_row = self.op.flops
        rows, pieces = float(self.rows), 1
        for role, size, rule in self._rules:
            if any(text[0] == "S" for text in rule[0] + rule[1]):
                rows, pieces = (rows / size, pieces) if role == "batch" else (rows, pieces * size)
        return (fixed + per_row * rows) / pieces

    def gemm(self) -> tuple[float, float, float, float]:
        """(m, n, k, batch) of the local contraction, from the equation's letters.

        A product without an equation (bmm, grouped experts) is one of as many FLOPs, with its own last dims.
        """
        sizes: dict[str, int] = {}
        if not self.op.equation:
            return self._flat_gemm()
        left, right, out = _letters(self.op.equation)
        for letters, (value, cuts) in zip((left, right, out), self._placed, strict=True):
            for dim, (letter, size) in enumerate(zip(letters, value.shape(self.rows), strict=True)):
                for pieces, placement in cuts:
                    size = size // pieces if placement.is_shard and placement.dim == dim else size
                sizes[letter] = min(size, sizes.get(letter, size))
        groups = [0.0] * 4
        groups[0] = prod(sizes[x] for x in left if x in out and x not in right)
        groups[1] = prod(sizes[x] for x in right if x in out and x not in left)
        groups[2] = prod(sizes[x] for x in left if x in right and x not in out)
        groups[3] = prod(sizes[x] for x in left if x in right and x in out)
        return groups[0], groups[1], groups[2], groups[3]

    def _flat_gemm(self) -> tuple[float, float, float, float]:
        k, n = (float(self.graph.values[name].fixed[-1]) for name in (self.op.inputs[0], self.op.outputs[0]))
        k, n = max(k, 1.0), max(n, 1.0)
        return max(self.flops() / (2 * n * k), 1.0), n, k, 1.0


def _letters(equation: str) -> tuple[str, str, str]:
    operands, out = equation.split("->")
    left, right = operands.split(",")
    return left, right, out
