"""A plan file says exactly one thing, or one error says what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpsearch.errors import PlanError
from hpsearch.plan import Plan
from tests.plan.sample import model, plan_file

Tree = dict[str, Any]


def test_a_saved_plan_loads_as_itself(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path, model())
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded.content == path.read_bytes() == plan.content
    assert loaded.content.endswith(b"}\n")
    assert not loaded.is_edited
    assert str(loaded.mesh) == "tp=2 x dp_shard=2"


def test_bytes_do_not_depend_on_the_order_of_keys(plan: Plan) -> None:
    def reverse(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: reverse(tree[key]) for key in reversed(tree)}
        return [reverse(item) for item in tree] if isinstance(tree, list) else tree

    assert Plan.from_bytes(json.dumps(reverse(json.loads(plan.content))).encode()).content == plan.content


def test_floats_survive_to_the_last_bit(plan: Plan) -> None:
    floats = {"step_s": 0.1 + 0.2, "compute_s": 5e-324, "exposed_s": 0.1 + 0.2}
    proof = {"objective_s": 0.1 + 0.2, "bound_s": 0.1 + 0.2}
    file = plan.file.model_copy(
        update={
            "predicted": plan.file.predicted.model_copy(update=floats),
            "certificate": plan.file.certificate.model_copy(update=proof),
        }
    )
    loaded = Plan.from_bytes(Plan(file).content)
    assert loaded.file.predicted.step_s == 0.1 + 0.2
    assert loaded.file.predicted.compute_s == 5e-324


def put(*path: str | int, value: Any) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        at: Any = tree
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value

    return edit


def drop(*path: str | int) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        at: Any = tree
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]

    return edit


def again(field: str) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        tree[field].append(tree[field][0])

    return edit


FIX = "Correct it there, or write the plan again with `hpsearch plan`."
ORIGINAL = "These numbers are the search's own; restore them, or search again with `hpsearch plan`."
AGAIN = "Write it again with `hpsearch plan`."
EDITS: list[tuple[str, Callable[[Tree], None], str]] = [
    ("older", put("schema_version", value="hpsearch.plan/0"), f"expected schema hpsearch.plan/1, but found the older hpsearch.plan/0. {AGAIN}"),
    ("newer", put("schema_version", value="hpsearch.plan/2"), "expected schema hpsearch.plan/1, but found the newer hpsearch.plan/2. Update hpsearch, or write the plan again with this version."),
    ("foreign", put("schema_version", value=3), "expected schema hpsearch.plan/1, but found 3. Is this a plan file?"),
    ("no version", drop("schema_version"), f"expected key schema_version with 'hpsearch.plan/1', but it is missing. {AGAIN}"),
    ("extra", put("job", "speed", value=1), "unknown key job.speed. Delete it; schema hpsearch.plan/1 does not have it."),
    ("missing", drop("parameters", 1, "used"), f"key parameters[1].used is missing. {AGAIN}"),
    ("type", put("mesh", 0, "size", value="2"), f"mesh[0].size: expected a valid integer, but found '2'. {FIX}"),
    ("null", put("predicted", "step_s", value=None), f"predicted.step_s: expected a valid number, but found null. {FIX}"),
    ("two", lambda t: (drop("model", "name")(t), drop("model", "source")(t), put("job", "recipe", value=[])(t)), f"key model.name is missing (1 more after this one). {AGAIN}"),
    ("axis", put("mesh", 0, "name", value="pp"), "mesh: unknown axis 'pp'. Axes are dp_replicate, cp, tp, ep, dp_shard."),
    ("axis twice", put("mesh", 0, "name", value="dp_shard"), "mesh: axis dp_shard stands twice. Delete one of the two."),
    ("order", lambda t: t["mesh"].reverse(), "mesh: expected the axes in split order tp, dp_shard, but found dp_shard, tp. Reorder them."),
    ("degree one", put("mesh", 0, "size", value=1), "mesh: axis tp has size 1, expected at least 2. Leave out axes of size 1."),
    ("product", put("mesh", 1, "size", value=4), "mesh: expected 4 devices (cluster.devices), but tp=2 x dp_shard=4 gives 8. The product of the degrees must be the number of devices."),
    ("stride", put("mesh", 1, "stride", value=1), "mesh: axis dp_shard has stride 1, expected 2. Strides follow from the degrees: tp on neighbouring ranks, then cp, ep, dp_shard, dp_replicate."),
    ("batch", put("job", "micro_batches", value=3), "job: global batch 8: expected a multiple of micro_batches x data ranks = 3 x 2 = 6, but 8 % 6 = 2. Legal micro_batches on 2 data ranks: [1, 2, 4]; the next legal global batch is 12."),
    ("no micro-batch", put("job", "micro_batches", value=0), "job.micro_batches: expected at least 1, but found 0. Correct it."),
    ("recipe", put("job", "recipe", value="fp4"), "job.recipe: unknown 'fp4'. Recipes are bf16, bf16_grads, fp8, fp32, fp64."),
    ("optimizer", put("job", "optimizer", value="shampoo"), "job.optimizer: unknown 'shampoo'. Optimizers are adamw, adam, sgd, momentum."),
    ("recompute", put("job", "recompute", "Layer", value="some"), "job.recompute: Layer is 'some'. Expected none or full."),
    ("block", put("job", "recompute", "Loyer", value="full"), "job.recompute: no graph is called 'Loyer'. Graphs of this plan: Layer, outer."),
    ("dtype", put("inputs", 0, "dtype", value="int4"), "input input_ids: unknown dtype 'int4'. Known: float64, "),
    ("input twice", again("inputs"), "input input_ids stands twice. Delete one of the two."),
    ("parameter twice", again("parameters"), "parameter embed.weight stands twice. Delete one of the two."),
    ("place twice", put("parameters", 1, "graph", value="outer"), None),
    ("count", put("parameters", 0, "count", value=0), "parameter embed.weight: count is 0, expected 1 to 1000000000. Correct it."),
    ("too many", put("parameters", 0, "count", value=10**9 + 1), "parameter embed.weight: count is 1000000001, expected 1 to 1000000000. Correct it."),
    ("empty", put("parameters", 0, "shape", value=[0, 1]), "parameter embed.weight: expected sizes of at least 1, but its shape is [0, 1]. Write the model's own."),
    ("empty input", put("inputs", 0, "shape", value=[4, -8]), "input input_ids: expected sizes of at least 1, but its shape is [4, -8]. Write the model's own."),
    ("residency", put("parameters", 0, "residency", value="always"), "parameter embed.weight, residency: unknown 'always'. Expected stored, step, micro_batch."),
    ("not gathered", put("parameters", 0, "residency", value="stored"), "parameter embed.weight: residency is stored, but it is stored as dp_shard:S0 and used as R. Set residency to step or micro_batch, or make the two layouts equal."),
    ("reduce", put("parameters", 0, "reduce", value="never"), "parameter embed.weight, reduce: unknown 'never'. Expected step, micro_batch."),
    ("placement", put("parameters", 0, "stored", value="dp_shard:X0"), "parameter embed.weight, stored: placement 'X0': expected R, P or S<dim>. Write for example S0."),
    ("hops", put("mesh", 0, "hops", value=[2]), "mesh: axis tp has hops 2, expected none. Leave them out."),
    ("no axis", put("parameters", 0, "stored", value="S0"), "parameter embed.weight, stored: layout 'S0': expected axis:placement, but got 'S0'. Write for example tp:S0."),
    ("other axis", put("parameters", 0, "stored", value="dp_replicate:S0"), "parameter embed.weight, stored: 'dp_replicate:S0' names axis 'dp_replicate'. The mesh has tp, dp_shard."),
    ("axis placed twice", put("parameters", 0, "stored", value="tp:S0 tp:S1"), "parameter embed.weight, stored: layout 'tp:S0 tp:S1': expected each axis once, but got tp twice. Keep one."),
    ("dim", put("parameters", 0, "stored", value="dp_shard:S2"), "parameter embed.weight, stored: 'dp_shard:S2' cuts dim 2, but shape [32, 16] has dims 0 to 1. Name one of them."),
    ("partial", put("parameters", 0, "used", value="tp:P"), "parameter embed.weight, used: 'tp:P' is partial over tp. Only a gradient may wait for its sum; write R or S<dim>."),
    ("layout order", put("parameters", 0, "stored", value="dp_shard:S0 tp:S0"), "parameter embed.weight, stored: expected 'tp:S0 dp_shard:S0', but found 'dp_shard:S0 tp:S0'. Axes stand in mesh order, one space apart, without R."),
    ("rule", put("placements", "Layer", "mm", "tp", value="R,S0"), "placements.Layer.mm.tp: expected inputs->outputs, but found 'R,S0'. Write for example R,S0->S1."),
    ("rule word", put("placements", "Layer", "mm", "tp", value="R,S0->Q"), "placements.Layer.mm.tp: 'R,S0->Q': placement 'Q': expected R, P or S<dim>. Write for example S0."),
    ("rule axis", put("placements", "Layer", "mm", "cp", value="R,S0->S1"), "placements.Layer.mm: names axis 'cp'. The mesh has tp, dp_shard."),
    ("kind", put("collectives", 0, "kind", value="all_scatter"), "collectives[0] (all_scatter of embed.weight): unknown kind 'all_scatter'. Kinds are all_gather, reduce_scatter, all_reduce, all_to_all, shift."),
    ("phase", put("collectives", 0, "phase", value="later"), "collectives[0] (all_gather of embed.weight): unknown phase 'later'. Phases are gather, forward, backward, reduce, step."),
    ("negative", put("predicted", "bytes", "gradients", value=-1), "predicted.bytes.gradients: expected no negative number, but found -1. Correct it."),
    ("memory", put("cluster", "memory_bytes", value=0), "cluster.memory_bytes: expected a positive number, but found 0. Correct it."),
    ("negative time", put("predicted", "exposed_s", value=-0.5), "predicted.exposed_s: expected no negative number, but found -0.5. Correct it."),
    ("negative calls", put("collectives", 0, "calls", value=-1), "collectives[0] (all_gather of embed.weight): 2048 bytes, -1 calls, 0.0001 s. None of them can be negative."),
    ("step", put("predicted", "step_s", value=0.001), f"predicted.step_s: expected compute_s + exposed_s = 0.0031, but found 0.001. {ORIGINAL}"),
    ("communication", put("predicted", "communication_s", value=0.001), f"predicted.communication_s: expected calls x seconds of collectives = 0.00144, but found 0.001. {ORIGINAL}"),
    ("peak", put("predicted", "peak_bytes", value=1), f"predicted.peak_bytes: expected the sum of predicted.bytes = 10240, but found 1. {ORIGINAL}"),
    ("status", put("certificate", "status", value="perfect"), f"certificate.status: expected optimal or feasible, but found 'perfect'. {ORIGINAL}"),
    ("objective", put("certificate", "objective_s", value=0.0001), f"certificate.objective_s: expected predicted.step_s = 0.0031, but found 0.0001. {ORIGINAL}"),
    ("bound", put("certificate", "bound_s", value=0.01), f"certificate.bound_s: expected at most objective_s = 0.0031, but found 0.01. A lower bound above the objective bounds nothing. {ORIGINAL}"),
    ("gap", put("certificate", "bound_s", value=0.00155), f"certificate.gap: expected (objective_s - bound_s) / objective_s = 0.5, but found 0. {ORIGINAL}"),
    ("no optimum", lambda t: t["certificate"].update(bound_s=0.00155, gap=0.5), f"certificate.status: optimal, but the gap is 0.5. {ORIGINAL}"),
    ("fewer than none", put("certificate", "solved", value=-2), "certificate.solved: expected no negative number, but found -2. Correct it."),
    ("none solved", put("certificate", "solved", value=0), f"certificate: expected one or more solved, and at most 6 considered in all, but found 0 solved and 3 pruned. {ORIGINAL}"),
    ("more than all", put("certificate", "considered", value=4), f"certificate: expected one or more solved, and at most 4 considered in all, but found 2 solved and 3 pruned. {ORIGINAL}"),
    ("too full", put("cluster", "memory_bytes", value=10239), f"predicted.peak_bytes: expected at most cluster.memory_bytes = 10239, but found 10240. A plan fits its devices. {ORIGINAL}"),
    ("collective's dtype", put("collectives", 0, "dtype", value="float31"), "collectives[0] (all_gather of embed.weight): unknown dtype 'float31'. Known: float64, "),
    ("seal", put("predicted", "priced", value=""), "predicted.priced is empty. Write the plan with hpsearch; the field tells an edit by hand."),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), [pytest.param(e, m, id=name) for name, e, m in EDITS])
def test_a_damaged_plan_is_refused_with_its_first_fault(plan: Plan, edit: Any, message: str | None) -> None:
    tree = json.loads(plan.content)
    edit(tree)
    if message is None:
        tree["parameters"][1]["local"] = tree["parameters"][0]["local"]
        message = "parameter embed.weight: embed.weight of outer stands twice. Delete one of the two."
    with pytest.raises(PlanError) as error:
        Plan.from_bytes(json.dumps(tree).encode(), "p.json")
    assert str(error.value).startswith(f"p.json: {message}")


TEXTS = [
    (lambda t: "", f"expected a plan, but the file is empty. {AGAIN}"),
    (lambda t: "[]", f"expected a JSON object, but found a list of 0. {AGAIN}"),
    (lambda t: t.replace('"gap": 0.0', '"gap": NaN'), f"expected finite numbers, but found NaN at line 5, column 12. {AGAIN}"),
    (lambda t: t.replace('"gap": 0.0', '"gap": -Infinity'), f"expected finite numbers, but found -Infinity at line 5, column 12. {AGAIN}"),
    (lambda t: t.replace('"gap": 0.0', '"gap": 1e999'), f"expected finite numbers, but found 1e999 at line 5, column 12. {AGAIN}"),
    (lambda t: t.replace('"gap": 0.0', '"gap": 0.0, "gap": 1.0'), "key 'gap' stands twice in one object. Delete one of the two."),
    (lambda t: t.replace('"gap": 0.0', '"gap": 0.0,,'), f"expected JSON, but expecting property name enclosed in double quotes at line 5, column 16. {AGAIN}"),
    (lambda t: "[" * 100_000, "expected a plan, but the JSON cannot be read: "),
    (lambda t: t.replace('"gap": 0.0', '"gap": ' + "9" * 5000), "expected a plan, but the JSON cannot be read: "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), TEXTS)
def test_text_that_is_no_plan_is_refused(plan: Plan, change: Callable[[str], str], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_bytes(change(plan.content.decode()).encode(), "p.json")
    assert str(error.value).startswith(f"p.json: {message}")


def test_a_plan_cut_off_anywhere_is_refused_with_line_and_column(plan: Plan) -> None:
    text = plan.content.decode().rstrip()
    for length in range(1, len(text), 7):
        with pytest.raises(PlanError, match=r"at line \d+, column \d+"):
            Plan.from_bytes(text[:length].encode(), "p.json")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(PlanError, match="expected UTF-8 text, but byte 1 is none"):
        Plan.from_bytes(b"{\xff}", "p.json")


def test_a_consistent_edit_is_accepted_and_shows(plan: Plan) -> None:
    tree = json.loads(plan.content)
    tree["parameters"][0] |= {"stored": "tp:S1 dp_shard:S0", "reduce": "step"}
    tree["job"] |= {"micro_batches": 1, "recompute": {"Layer": "full"}}
    edited = Plan.from_bytes(json.dumps(tree).encode())
    assert edited.is_edited
    assert "edited by hand" in str(edited)
    assert Plan.from_bytes(edited.content).is_edited


FORGED: list[Callable[[Tree], None]] = [
    put("certificate", "refused", value=[]),
    put("certificate", "considered", value=1000),
    put("certificate", "space", value="everything"),
    put("versions", value={}),
    put("cluster", "name", value="other"),
    put("collectives", 0, "nbytes", value=1),
    lambda t: (t["certificate"].update(objective_s=0.002, bound_s=0.002), t["predicted"].update(step_s=0.002, exposed_s=0.0)),
]  # fmt: skip


@pytest.mark.parametrize("edit", FORGED)
def test_a_forged_number_that_contradicts_nothing_shows_as_an_edit(plan: Plan, edit: Any) -> None:
    tree = json.loads(plan.content)
    assert not Plan.from_bytes(json.dumps(tree).encode()).is_edited
    edit(tree)
    assert Plan.from_bytes(json.dumps(tree).encode()).is_edited


def test_a_solution_with_a_gap_is_no_contradiction() -> None:
    file = plan_file()
    proof = file.certificate.model_copy(update={"status": "feasible", "bound_s": 0.00155, "gap": 0.5})
    assert not Plan.from_bytes(Plan(file.model_copy(update={"certificate": proof})).content).is_edited


def test_saying_where_the_model_came_from_is_no_edit_and_hides_none(plan: Plan) -> None:
    assert not plan.with_source("other.json").is_edited
    tree = json.loads(plan.content)
    tree["certificate"]["considered"] = 1000
    assert Plan.from_bytes(json.dumps(tree).encode()).with_source("other.json").is_edited


def test_a_plan_written_before_aliases_loads(plan: Plan) -> None:
    tree = json.loads(plan.content)
    for entry in tree["parameters"]:
        del entry["aliases"]
    assert Plan.from_bytes(json.dumps(tree).encode(), "p.json", model()) == plan


def test_another_model_is_refused_with_its_first_difference(plan: Plan) -> None:
    def refusal(**changes: Any) -> str:
        with pytest.raises(PlanError) as error:
            Plan.from_bytes(plan.content, "p.json", model(**changes))
        return re.sub(r" Search again.*", "", str(error.value)).removeprefix("p.json: made for another model: ")

    assert refusal(layers=3) == "parameter layers.*.proj.weight stands for 2 tensors in the plan and 3 in the model."
    assert refusal(width=8) == "parameter embed.weight is [32, 16] in the plan and [32, 8] in the model."
    assert refusal(prefix="blocks") == (
        "parameter layers.*.proj.weight of the plan is called blocks.*.proj.weight in the model."
    )


def test_the_same_parameters_in_another_wiring_are_another_model(plan: Plan) -> None:
    import dataclasses

    graph = model()
    steps = (*graph.outer.steps[:2], dataclasses.replace(graph.outer.steps[2], inputs=("e",)), *graph.outer.steps[3:])
    twisted = dataclasses.replace(graph, outer=dataclasses.replace(graph.outer, steps=steps))
    with pytest.raises(PlanError, match="names and shapes agree with the plan, but the operations or their wiring"):
        Plan.from_bytes(plan.content, "p.json", twisted)


def test_another_sequence_length_is_another_job(plan: Plan) -> None:
    import dataclasses

    graph = model()
    longer = dataclasses.replace(graph, inputs=(dataclasses.replace(graph.inputs[0], fixed=(0, 16)),))
    expected = r"input input_ids is \[4, 8\] int64 in the plan and \[4, 16\] int64 for the model"
    with pytest.raises(PlanError, match=expected):
        Plan.from_bytes(plan.content, "p.json", longer)


def test_the_fingerprint_does_not_depend_on_rows_or_source_lines() -> None:
    import dataclasses

    from hpsearch.plan import model_fingerprint

    graph = model()
    steps = tuple(dataclasses.replace(s, source="a.py:1") if hasattr(s, "source") else s for s in graph.outer.steps)
    same = dataclasses.replace(graph, rows=64, outer=dataclasses.replace(graph.outer, steps=steps))
    assert model_fingerprint(same) == model_fingerprint(graph)
    assert model_fingerprint(model(layers=3)) != model_fingerprint(graph)


AS_THE_MODEL = "Write it as the model has it, or search again with `hpsearch plan`."
MISFITS = [
    (put("parameters", 0, "shape", value=[32, 1]), f"p.json: parameter embed.weight is [32, 1] in the plan and [32, 16] in the model. {AS_THE_MODEL}"),
    (put("parameters", 1, "count", value=3), f"p.json: parameter layers.*.proj.weight stands for 3 tensors in the plan and 2 in the model. {AS_THE_MODEL}"),
    (put("parameters", 1, "graph", value="Loyer"), f"p.json: parameter layers.*.proj.weight [16, 16] is in the plan and not in the model. {AS_THE_MODEL}"),
    (drop("parameters", 1), f"p.json: parameter layers.*.proj.weight [16, 16] is in the model and not in the plan. {AS_THE_MODEL}"),
    (drop("inputs", 0), f"p.json: inputs: expected input_ids int64, but found none. {AS_THE_MODEL}"),
    (put("inputs", 0, "dtype", value="int32"), f"p.json: inputs: expected input_ids int64, but found input_ids int32. {AS_THE_MODEL}"),
    (put("placements", "outer", "embid", value={}), f"p.json: the plan places step embid of outer, which the model does not have. {AS_THE_MODEL}"),
    (put("placements", "Layer", "mm", "tp", value="S0,S0->S0"), "placements.Layer.mm.tp: hpsearch.einsum cannot run as 'S0,S0->S0'. Its rules: R,S0->S2, S0,R->S0, S0,S0->P, S2,R->S0, S2,S0->P."),
    (put("placements", "Layer", "mm", "tp", value="R->R"), "placements of Layer.mm, axis tp: expected 2 inputs and 1 outputs, but 'R->R' has 1 and 1. The plan was made for another graph; search again."),
    (put("parameters", 1, "used", value="R"), "p.json: parameter layers.*.proj.weight, used: R, but the placements make proj_weight as tp:S0. Edit both, or search again with `hpsearch plan` and --fix."),
    (put("parameters", 1, "gradient", value="dp_shard:P"), "p.json: parameter layers.*.proj.weight, gradient: dp_shard:P, but the placements make dw as tp:S0 dp_shard:P."),
    (put("job", "micro_batches", value=4), "p.json: input input_ids: expected shape [2, 8] for a micro-batch of 2 rows, but found [4, 8]. The shape follows from job.global_batch and job.micro_batches; correct either."),
    (put("model", "parameters", value=1025), f"p.json: model.parameters: expected 1024, but found 1025. {AS_THE_MODEL}"),
    (put("model", "name", value="Tinier"), f"p.json: model.name: expected Tiny, but found Tinier. {AS_THE_MODEL}"),
    (put("parameters", 0, "aliases", value=["head.weight"]), f"p.json: parameter embed.weight is tied to head.weight in the plan and to nothing in the model. {AS_THE_MODEL}"),
    (put("inputs", 0, "layout", value="R"), "p.json: input input_ids: layout R, but the placements bring ids as dp_shard:S0."),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), MISFITS)
def test_an_edit_that_the_model_cannot_take_is_refused(plan: Plan, edit: Any, message: str) -> None:
    tree = json.loads(plan.content)
    edit(tree)
    with pytest.raises(PlanError) as error:
        Plan.from_bytes(json.dumps(tree).encode(), "p.json", model())
    assert message in str(error.value)


def test_a_parameter_that_was_deleted_is_missed_without_the_model(plan: Plan) -> None:
    tree = json.loads(plan.content)
    tree["parameters"].pop(0)
    with pytest.raises(PlanError, match=r"p.json: parameters: expected \d+ elements in all .*, but found \d+"):
        Plan.from_bytes(json.dumps(tree).encode(), "p.json")


@pytest.mark.parametrize("field", ["name", "digest", "device", "memory_bytes"])
def test_what_a_plan_says_of_its_cluster_is_held_against_it(plan: Plan, field: str) -> None:
    from hpsearch.cluster import Cluster
    from hpsearch.plan.plan import cluster_entry

    cluster = Cluster.load("h100-sxm-roce400", devices=4)
    right = cluster_entry(cluster)
    assert Plan.from_bytes(Plan(plan_file().model_copy(update={"cluster": right})).content, "p.json", None, cluster)
    value = right.memory_bytes - 1 if field == "memory_bytes" else "other"
    edited = plan.file.model_copy(update={"cluster": right.model_copy(update={field: value})})
    with pytest.raises(PlanError, match=f"made for another cluster: {field} is .* in the plan"):
        Plan.from_bytes(Plan(edited).content, "p.json", None, cluster)


def test_a_parameter_nobody_has_is_answered_with_near_names(plan: Plan) -> None:
    assert plan.parameter("layers.1.proj.weight").count == 2
    with pytest.raises(PlanError, match=r"layers.1.fc.weight: the plan has no such parameter.*layers.\*.proj.weight"):
        plan.parameter("layers.1.fc.weight")


def test_plan_file_is_complete() -> None:
    assert plan_file().predicted.priced == ""
    assert len(Plan(plan_file()).file.predicted.priced) == 64
