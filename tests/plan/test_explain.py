from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from hpsearch.errors import PlanError
from hpsearch.plan import Plan, Refusal
from hpsearch.plan.diff import diff
from hpsearch.plan.explain import explain, explain_parameter, in_words
from hpsearch.plan.names import data_parallel_name, tensor_parallel_name
from hpsearch.plan.units import count, seconds, size
from tests.plan.sample import param


def text(renderable: RenderableType) -> str:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def edited(plan: Plan, **job: Any) -> Plan:
    return dataclasses.replace(plan, file=plan.file.model_copy(update={"job": plan.file.job.model_copy(update=job)}))


def test_a_plan_is_said_in_words(plan: Plan) -> None:
    assert in_words(plan) == (
        "FSDP (ZeRO-3). Tensor parallel over 2 devices, 50.0% of the parameters cut. A step takes 8 rows in 2 "
        "micro-batches of 4 rows (2 a device), recipe fp32, adamw. No recomputation. Pinned: tp=2."
    )
    assert "Activations are recomputed in backward in Layer." in in_words(edited(plan, recompute={"Layer": "full"}))


def test_activations_cut_over_tp_are_told_from_parameters(plan: Plan) -> None:
    from hpsearch.plan.names import activations_cut_over_tp

    assert activations_cut_over_tp(plan) == []
    layer = plan.file.placements["Layer"] | {"x": {"dp_shard": "->S0", "tp": "->S1"}, "tangent_0": {"tp": "->S1"}}
    file = plan.file.model_copy(update={"placements": plan.file.placements | {"Layer": layer}})
    cut = Plan(file)
    assert activations_cut_over_tp(cut) == [("Layer", "S1")]
    assert "Activations arrive at Layer cut over tp (sequence parallel)." in in_words(cut)


def test_the_explanation_holds_every_fact(plan: Plan) -> None:
    said = text(explain(plan))
    for fact in (
        "Tiny (1,024 parameters) on 4 devices of toy (toy-device): tp=2 x dp_shard=2.",
        "fabric",
        "64.5%",
        "column parallel (dim 0)",
        "Optimal: objective 3.1 ms, lower bound 3.1 ms, gap 0.00%",
        "num_key_value_heads 2 is not divisible by 4",
        "dp_shard=4 micro_batches=2",
        "layers.*.proj.weight",
    ):
        assert fact in said
    assert "Edited by hand" not in said
    said = "Edited by hand: predictions and certificate are of the original."
    assert said in text(explain(edited(plan, micro_batches=4)))


def test_names_with_brackets_are_said_as_they_stand(plan: Plan) -> None:
    odd = "[/red]:warning:[bold]"
    table = plan.file.parameters[0].model_copy(update={"pattern": odd, "local": odd})
    predicted = plan.file.predicted.model_copy(update={"bytes": {odd: 10240}})
    proof = plan.file.certificate.model_copy(update={"refused": (Refusal(candidate=odd, reason=odd),)})
    changes = {"parameters": (table, *plan.file.parameters[1:]), "predicted": predicted, "certificate": proof}
    made = dataclasses.replace(plan, file=plan.file.model_copy(update=changes))
    assert text(explain(made)).count(odd) == 4
    assert text(explain_parameter(made, odd)).startswith(f"{odd}: [32, 16]")
    assert odd in text(diff(plan, made))


def test_a_tied_name_finds_its_parameter(plan: Plan) -> None:
    tied = plan.file.parameters[0].model_copy(update={"aliases": ("lm_head.weight",)})
    made = Plan(plan.file.model_copy(update={"parameters": (tied, *plan.file.parameters[1:])}))
    assert made.parameter("lm_head.weight") == tied == made.parameter("embed.weight")
    said = text(explain_parameter(made, "lm_head.weight"))
    assert said.startswith("lm_head.weight (the same tensor as embed.weight): [32, 16], 512 elements")
    said = text(explain_parameter(made, "embed.weight"))
    assert said.startswith("embed.weight (the same tensor as lm_head.weight): [32, 16]")


def test_why_says_where_a_parameter_lives(plan: Plan) -> None:
    said = text(explain_parameter(plan, "layers.1.proj.weight"))
    for fact in (
        "layers.1.proj.weight (one of 2 called layers.*.proj.weight): [16, 16], 256 elements, trainable, in Layer.",
        "Stored as tp:S0 dp_shard:S0: a device keeps [4, 16], 0.25 of it",
        "Used as tp:S0: [8, 16] at the operation.",
        "Backward leaves its gradient as tp:S0 dp_shard:P; it is brought to tp:S0 dp_shard:S0 after each backward.",
        "Familiar names: FSDP (ZeRO-3), tp column parallel (dim 0).",
        "Layer/dx (float32)",
        "0.0035 s",
    ):
        assert fact in said
    assert "embed.weight" not in said
    with pytest.raises(PlanError, match="no such parameter"):
        explain_parameter(plan, "nothing")


NAMES = [
    ("R", "R", "stored", "step", "DDP"),
    ("dp_shard:S0", "R", "step", "step", "ZeRO-1"),
    ("dp_shard:S0", "R", "step", "micro_batch", "ZeRO-2"),
    ("dp_shard:S0", "R", "micro_batch", "micro_batch", "FSDP (ZeRO-3)"),
]


@pytest.mark.parametrize(("stored", "used", "residency", "reduce", "name"), NAMES)
def test_layouts_have_the_names_the_field_gives_them(
    plan: Plan, stored: str, used: str, residency: str, reduce: str, name: str
) -> None:
    entry = plan.file.parameters[0].model_copy(
        update={"stored": stored, "used": used, "residency": residency, "reduce": reduce}
    )
    assert data_parallel_name(entry, plan.mesh.axes) == name


def test_hsdp_is_a_shard_inside_replicas(plan: Plan) -> None:
    from hpsearch.layout import Mesh

    entry = plan.file.parameters[0]
    assert data_parallel_name(entry, Mesh.of(dp_replicate=2, dp_shard=2).axes) == "FSDP (ZeRO-3) inside replicas (HSDP)"
    assert data_parallel_name(entry, Mesh.of(tp=4).axes) == "no data parallelism"


def test_a_bias_tells_columns_from_rows() -> None:
    weight = param("h.*.c_attn.weight", "Block", "c_attn.weight", (16, 48), 2, "tp:S1")
    bias = param("h.*.c_attn.bias", "Block", "c_attn.bias", (48,), 2, "tp:S0")
    out = param("h.*.c_proj.weight", "Block", "c_proj.weight", (16, 16), 2, "tp:S0")
    whole = param("h.*.c_proj.bias", "Block", "c_proj.bias", (16,), 2, "R")
    entries = (weight, bias, out, whole)
    assert [tensor_parallel_name(e, entries) for e in entries] == [
        "column parallel (dim 1)",
        "cut on dim 0",
        "row parallel (dim 0)",
        "replicated",
    ]


def test_diff_shows_what_changed_and_nothing_else(plan: Plan) -> None:
    assert text(diff(plan, plan)).strip() == "The two plans are equal, byte for byte."
    said = text(diff(plan, edited(plan, micro_batches=4)))
    assert "job.micro_batches   2           4" in said
    assert "Parameters" not in said
    file = plan.file.model_copy(
        update={"predicted": plan.file.predicted.model_copy(update={"step_s": 0.0062}), "collectives": ()}
    )
    said = text(diff(plan, Plan(file)))
    assert "6.2 ms (x 2)" in said
    assert re.search(r"forward all_gather over tp +4 calls, 4 KiB +-", said)


def test_numbers_are_said_with_three_digits() -> None:
    assert [seconds(s) for s in (1.5, 0.00123, 4.5e-6, 2e-9, 0)] == ["1.5 s", "1.23 ms", "4.5 µs", "2 ns", "0 s"]
    assert [size(b) for b in (0, 1023, 1536, 2**30, 3 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 GiB", "3 TiB"]
    assert [size(n * 2**20) for n in (999, 1000, 1013)] == ["999 MiB", "0.977 GiB", "0.989 GiB"]
    assert [count(n) for n in (999, 8_030_000_000, 124_439_808)] == ["999", "8.03 B", "124 M"]
