"""A two-matmul model written by hand as a `ModelGraph`, and a cluster with round numbers.

outer: x [rows, 8, 16] --block--block-- y --sum--> loss
block: h = x·w1ᵀ (16→32), a = gelu(h), y = a·w2ᵀ (32→16) + x, with its backward
"""

from __future__ import annotations

from dataclasses import replace

from hpsearch.cluster import Cluster, Device, Tier
from hpsearch.graph import Call, Input, ModelGraph, Op, OpGraph, Param, Rule, Value

SEQUENCE, WIDTH, HIDDEN = 8, 16, 32


def value(name: str, *shape: int | str, role: str = "op", dtype: str = "float32") -> Value:
    """`"rows"` marks the batch dim."""
    fixed = tuple(0 if s == "rows" else int(s) for s in shape)
    return Value(name, fixed, tuple(int(s == "rows") for s in shape), dtype, role)


def contraction_rules(equation: str) -> tuple[Rule, ...]:
    """Replicate, and one rule for each letter: cut it everywhere, the result is partial when it is summed away."""
    operands, out = equation.split("->")
    left, right = operands.split(",")
    found: list[Rule] = [(("R", "R"), ("R",)), (("P", "R"), ("P",)), (("R", "P"), ("P",))]
    for letter in sorted(set(left + right)):
        sides = tuple(f"S{text.index(letter)}" if letter in text else "R" for text in (left, right))
        found.append((sides, (f"S{out.index(letter)}" if letter in out else "P",)))
    return tuple(found)


def pointwise_rules(dims: int, operands: int, linear: bool) -> tuple[Rule, ...]:
    found: list[Rule] = [(("R",) * operands, ("R",))]
    found += [((f"S{d}",) * operands, (f"S{d}",)) for d in range(dims)]
    if linear:
        found.append((("P",) * operands, ("P",)))
    return tuple(found)


class Drawing:
    """Collects the parts of one OpGraph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Value] = {}
        self.steps: list[Op | Call] = []
        self.tables: list[tuple[Rule, ...]] = []

    def add(self, v: Value) -> str:
        self.values[v.name] = v
        return v.name

    def op(
        self,
        name: str,
        kind: str,
        inputs: tuple[str, ...],
        out: Value,
        phase: str,
        rules: tuple[Rule, ...],
        equation: str = "",
    ) -> str:
        self.tables.append(rules)
        target = "hpsearch.einsum" if equation else f"toy.{kind}"
        self.add(out)
        self.steps.append(Op(name, target, inputs, (out.name,), phase, kind, len(self.tables) - 1, (0, 0), equation))
        return out.name

    def einsum(self, name: str, equation: str, a: str, b: str, out: Value, phase: str) -> str:
        return self.op(name, "matmul", (a, b), out, phase, contraction_rules(equation), equation)


def block_graph() -> OpGraph:
    d = Drawing("Block")
    d.add(value("x", "rows", SEQUENCE, WIDTH, role="input"))
    d.add(value("w1", HIDDEN, WIDTH, role="param"))
    d.add(value("w2", WIDTH, HIDDEN, role="param"))
    wide, narrow = ("rows", SEQUENCE, HIDDEN), ("rows", SEQUENCE, WIDTH)
    d.einsum("h", "bsd,hd->bsh", "x", "w1", value("h", *wide), "forward")
    d.op("a", "pointwise", ("h",), value("a", *wide), "forward", pointwise_rules(3, 1, False))
    d.einsum("o", "bsh,dh->bsd", "a", "w2", value("o", *narrow), "forward")
    d.op("y", "pointwise", ("o", "x"), value("y", *narrow), "forward", pointwise_rules(3, 2, True))
    d.add(value("dy", *narrow, role="tangent"))
    d.einsum("da", "bsd,dh->bsh", "dy", "w2", value("da", *wide), "backward")
    d.einsum("dw2", "bsd,bsh->dh", "dy", "a", value("dw2", WIDTH, HIDDEN), "backward")
    d.op("dh", "pointwise", ("da", "h"), value("dh", *wide), "backward", pointwise_rules(3, 2, False))
    d.einsum("dw1", "bsh,bsd->hd", "dh", "x", value("dw1", HIDDEN, WIDTH), "backward")
    d.einsum("dxo", "bsh,hd->bsd", "dh", "w1", value("dxo", *narrow), "backward")
    d.op("dx", "pointwise", ("dxo", "dy"), value("dx", *narrow), "backward", pointwise_rules(3, 2, True))
    return OpGraph(
        "Block", d.values, tuple(d.steps), {"w1": "w1", "w2": "w2"}, {}, ("x",), ("y",), ("dy",), (0,), ("dx",),
        {"w1": "dw1", "w2": "dw2"}, tuple(d.tables),
    )  # fmt: skip


def outer_graph(depth: int) -> OpGraph:
    d = Drawing("outer")
    narrow = ("rows", SEQUENCE, WIDTH)
    x = d.add(value("batch", *narrow, role="input"))
    for i in range(depth):
        y = d.add(value(f"y{i}", *narrow))
        d.steps.append(Call(f"call{i}", "Block", i, "forward", (x,), (y,)))
        x = y
    whole: tuple[Rule, ...] = (
        (("R",), ("R",)), (("S0",), ("P",)), (("S1",), ("P",)), (("S2",), ("P",)), (("P",), ("P",)),
    )  # fmt: skip
    d.op("loss", "reduction", (x,), value("loss"), "forward", whole)
    d.add(value("dloss", role="tangent"))
    spread: tuple[Rule, ...] = (
        (("R",), ("R",)), (("R",), ("S0",)), (("R",), ("S1",)), (("R",), ("S2",)), (("P",), ("P",)),
    )  # fmt: skip
    g = d.op("spread", "pointwise", ("dloss",), value("g", *narrow), "backward", spread)
    for i in reversed(range(depth)):
        d.add(value(f"g{i}", *narrow))
        d.steps.append(Call(f"back{i}", "Block", i, "backward", (g,), (f"g{i}",)))
        g = f"g{i}"
    return OpGraph(
        "outer", d.values, tuple(d.steps), {}, {}, ("batch",), ("loss",), ("dloss",), (0,), (None,), {},
        tuple(d.tables),
    )  # fmt: skip


def toy_model(depth: int = 2) -> ModelGraph:
    params = {
        f"layers.{i}.{name}": Param(f"layers.{i}.{name}", shape, "float32", True)
        for i in range(depth)
        for name, shape in (("w1", (HIDDEN, WIDTH)), ("w2", (WIDTH, HIDDEN)))
    }
    batch = Input("x", (0, SEQUENCE, WIDTH), (1, 0, 0), "float32")
    instances = tuple(("Block", f"layers.{i}") for i in range(depth))
    return ModelGraph(
        "Toy", outer_graph(depth), {"Block": block_graph()}, instances, params, (batch,), "mean", "fp32", {}, 4
    )


def toy_cluster(devices: int = 4, memory_bytes: int = 10**9) -> Cluster:
    """Slow devices and slow links, no launch cost: 1 MFLOP/s, 1 MB/s of memory, 1 MB/s links, 1 ms latency."""
    cluster = Cluster.load("h100-sxm-roce400", devices=8)
    device = replace(
        cluster.device, name="toy", memory_bytes=memory_bytes, memory_bytes_per_s=1e6, memory_efficiency=1.0,
        peak=(("float32", 1e6), ("bfloat16", 1e6)), matmul_efficiency=1.0, attention_efficiency=1.0, launch_s=1e-6,
        collective_launch_s=1e-6, matmul=(), overlap_efficiency=0.5,
    )  # fmt: skip
    tier = replace(cluster.tiers[0], name="link", size=devices, bytes_per_s=1e6, latency_s=1e-5)
    assert isinstance(device, Device)
    assert isinstance(tier, Tier)
    return Cluster("toy", devices, device, (replace(tier, curves=()),))
