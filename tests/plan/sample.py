"""A small model graph and a plan for it, written by hand: two layers of one matmul between an embedding and a loss."""

from __future__ import annotations

from hpsearch.graph import Call, Input, ModelGraph, Op, OpGraph, Param, Rule, Value
from hpsearch.plan import (
    SCHEMA,
    AxisEntry,
    CertificateEntry,
    ClusterEntry,
    CollectiveEntry,
    InputEntry,
    JobEntry,
    ModelEntry,
    ParamEntry,
    PlanFile,
    PredictedEntry,
    Refusal,
    model_fingerprint,
)


def value(name: str, *dims: int, rows: bool = False, dtype: str = "float32", role: str = "op") -> Value:
    """With `rows`, the first dim is the batch."""
    return Value(
        name, (0, *dims) if rows else dims, (1, *(0 for _ in dims)) if rows else tuple(0 for _ in dims), dtype, role
    )


def rules(*texts: str) -> tuple[tuple[Rule, ...], ...]:
    """One table of rules, for every op of a graph."""
    sides = [[tuple(side.split(",")) for side in text.split("->")] for text in texts]
    return (tuple((left, right) for left, right in sides),)


def op(name: str, target: str, inputs: tuple[str, ...], outputs: tuple[str, ...], phase: str = "forward") -> Op:
    return Op(name, target, inputs, outputs, phase, "matmul", 0, (0, 1))


def block(width: int) -> OpGraph:
    values = [
        value("proj_weight", width, width, role="param"),
        value("x", 8, width, rows=True, role="input"),
        value("y", 8, width, rows=True),
        value("dy", 8, width, rows=True, role="tangent"),
        value("dx", 8, width, rows=True),
        value("dw", width, width),
    ]
    steps = (
        op("mm", "hpsearch.einsum", ("x", "proj_weight"), ("y",)),
        op("mm_x", "hpsearch.einsum", ("dy", "proj_weight"), ("dx",), "backward"),
        op("mm_w", "hpsearch.einsum", ("dy", "x"), ("dw",), "backward"),
    )
    return OpGraph(
        name="Layer",
        values={v.name: v for v in values},
        steps=steps,
        params={"proj.weight": "proj_weight"},
        buffers={},
        inputs=("x",),
        outputs=("y",),
        tangents=("dy",),
        tangent_of=(0,),
        input_grads=("dx",),
        param_grads={"proj.weight": "dw"},
        rule_tables=rules("S0,R->S0", "R,S0->S2", "S2,S0->P", "S0,S0->P", "S2,R->S0"),
    )


def model(layers: int = 2, width: int = 16, prefix: str = "layers") -> ModelGraph:
    names = ["e", *(f"h{i}" for i in range(layers))]
    grads = [f"d{name}" for name in names]
    values = [value("table", 32, width, role="param"), value("ids", 8, rows=True, dtype="int64", role="input")]
    values += [value(name, 8, width, rows=True) for name in (*names, *grads)]
    values += [value("loss"), value("dloss", role="tangent"), value("dtable", 32, width)]
    calls = [Call(f"call{i}", "Layer", i, "forward", (names[i],), (names[i + 1],)) for i in range(layers)]
    back = [Call(f"back{i}", "Layer", i, "backward", (grads[i + 1],), (grads[i],)) for i in reversed(range(layers))]
    steps = (
        op("embedding", "aten.embedding.default", ("table", "ids"), ("e",)),
        *calls,
        op("sum", "aten.sum.default", (names[-1],), ("loss",)),
        op("expand", "aten.expand.default", ("dloss",), (grads[-1],), "backward"),
        *back,
        op("embedding_back", "aten.embedding_dense_backward.default", (grads[0], "ids"), ("dtable",), "backward"),
    )
    outer = OpGraph(
        name="outer",
        values={v.name: v for v in values},
        steps=steps,
        params={"embed.weight": "table"},
        buffers={},
        inputs=("ids",),
        outputs=("loss",),
        tangents=("dloss",),
        tangent_of=(0,),
        input_grads=(None,),
        param_grads={"embed.weight": "dtable"},
        rule_tables=rules("R,S0->S0", "S0,S0->P"),
    )
    fqns = ["embed.weight", *(f"{prefix}.{i}.proj.weight" for i in range(layers))]
    shapes = [(32, width), *((width, width) for _ in range(layers))]
    return ModelGraph(
        name="Tiny",
        outer=outer,
        blocks={"Layer": block(width)},
        instances=tuple(("Layer", f"{prefix}.{i}") for i in range(layers)),
        params={f: Param(f, s, "float32", True) for f, s in zip(fqns, shapes, strict=True)},
        inputs=(Input("input_ids", (0, 8), (1, 0), "int64"),),
        loss_reduction="mean",
        recipe="fp32",
        rows=4,
    )


def param(pattern: str, graph: str, local: str, shape: tuple[int, ...], count: int, used: str) -> ParamEntry:
    cut = "dp_shard:S0" if used == "R" else f"{used} dp_shard:S0"
    return ParamEntry(
        pattern=pattern,
        graph=graph,
        local=local,
        shape=shape,
        count=count,
        trainable=True,
        stored=cut,
        used=used,
        residency="micro_batch",
        gradient="dp_shard:P" if used == "R" else f"{used} dp_shard:P",
        reduce="micro_batch",
    )


def collective(kind: str, axis: str, phase: str, what: str, nbytes: int, calls: int, seconds: float) -> CollectiveEntry:
    return CollectiveEntry(
        kind=kind, axis=axis, phase=phase, what=what, dtype="float32", nbytes=nbytes, calls=calls, seconds=seconds
    )


def plan_file() -> PlanFile:
    """Tiny on 4 devices: tp=2 inside dp_shard=2, two micro-batches of four rows."""
    layer, table = "layers.*.proj.weight", "embed.weight"
    return PlanFile(
        schema_version=SCHEMA,
        model=ModelEntry(name="Tiny", fingerprint=model_fingerprint(model()), parameters=1024, source="tiny.json"),
        cluster=ClusterEntry(name="toy", digest="c0ffee", devices=4, device="toy-device", memory_bytes=2**30),
        mesh=(
            AxisEntry(name="tp", size=2, stride=1, tier="node"),
            AxisEntry(name="dp_shard", size=2, stride=2, tier="fabric"),
        ),
        job=JobEntry(global_batch=8, micro_batches=2, recipe="fp32", fix={"tp": "2"}, recompute={"Layer": "none"}),
        inputs=(InputEntry(name="input_ids", shape=(4, 8), dtype="int64", layout="dp_shard:S0"),),
        parameters=(
            param(table, "outer", "embed.weight", (32, 16), 1, "R"),
            param(layer, "Layer", "proj.weight", (16, 16), 2, "tp:S0"),
        ),
        placements={
            "outer": {
                "embedding": {"dp_shard": "R,S0->S0"},
                "ids": {"dp_shard": "->S0"},
                "embedding_back": {"dp_shard": "S0,S0->P"},
            },
            "Layer": {
                "x": {"dp_shard": "->S0"},
                "proj_weight": {"tp": "->S0"},
                "mm": {"dp_shard": "S0,R->S0", "tp": "R,S0->S2"},
                "mm_x": {"dp_shard": "S0,R->S0", "tp": "S2,S0->P"},
                "mm_w": {"dp_shard": "S0,S0->P", "tp": "S2,R->S0"},
            },
        },
        collectives=(
            collective("all_gather", "dp_shard", "gather", table, 2048, 4, 1e-4),
            collective("all_gather", "dp_shard", "gather", layer, 512, 8, 5e-5),
            collective("all_gather", "tp", "forward", "Layer/y", 1024, 4, 2e-5),
            collective("all_reduce", "tp", "backward", "Layer/dx", 1024, 4, 4e-5),
            collective("reduce_scatter", "dp_shard", "reduce", table, 2048, 2, 1e-4),
            collective("reduce_scatter", "dp_shard", "reduce", layer, 512, 4, 5e-5),
        ),
        predicted=PredictedEntry(
            step_s=0.0031,
            compute_s=0.002,
            communication_s=0.00144,
            exposed_s=0.0011,
            bytes={"parameters": 1536, "gradients": 1536, "optimizer": 3072, "activations": 4096},
            peak_bytes=10240,
        ),
        certificate=CertificateEntry(
            status="optimal",
            objective_s=0.0031,
            bound_s=0.0031,
            gap=0.0,
            space="meshes of dp_replicate, dp_shard and tp; one recompute choice a block class",
            considered=6,
            solved=2,
            pruned=3,
            refused=(Refusal(candidate="tp=4", reason="num_key_value_heads 2 is not divisible by 4"),),
            runners_up=(Refusal(candidate="dp_shard=4 micro_batches=2", reason="0.0035 s"),),
        ),
        versions={"hpsearch": "0.1.0", "torch": "2.13.0"},
    )
