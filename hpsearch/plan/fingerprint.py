"""Is this the model that the plan was made for? A digest answers; the first difference says why not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from hpsearch.errors import PlanError
from hpsearch.graph import Call, ModelGraph, Op, OpGraph
from hpsearch.plan.patterns import further_names, param_patterns
from hpsearch.plan.schema import PlanFile

REPLAN = "Search again for this model with `hpsearch plan`, or load the model that the plan was made for."


def model_fingerprint(graph: ModelGraph) -> str:
    """sha256 over everything of the model that a plan relies on: parameters (shapes, ties, trainable), operations,
    wiring, affine shapes, recipe.

    Independent of the rows at capture, of where the source stands, of rules, of limits, and of a capacity of experts.
    """
    graph = graph.traced or graph
    tree = {
        "name": graph.name,
        "recipe": graph.recipe,
        "loss": graph.loss_reduction,
        "params": [[p.fqn, p.shape, p.dtype, p.trainable, p.aliases] for p in graph.params.values()],
        "inputs": [[i.name, i.fixed, i.per_row, i.dtype] for i in graph.inputs],
        "instances": graph.instances,
        "pieces": [_piece_tree(piece) for piece in (graph.outer, *graph.blocks.values())],
    }
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _piece_tree(piece: OpGraph) -> dict[str, Any]:
    return {
        "name": piece.name,
        "values": [[v.name, v.fixed, v.per_row, v.dtype, v.role] for v in piece.values.values()],
        "steps": [_step_tree(step) for step in piece.steps],
        "params": piece.params,
        "buffers": piece.buffers,
        "ends": [piece.inputs, piece.outputs, piece.tangents, piece.tangent_of, piece.input_grads],
        "param_grads": piece.param_grads,
        "aliases": piece.aliases,
    }


def _step_tree(step: Op | Call) -> list[Any]:
    if isinstance(step, Call):
        return ["call", step.name, step.block, step.instance, step.phase, step.inputs, step.outputs]
    return ["op", step.name, step.target, step.inputs, step.outputs, step.phase, step.equation]


def check_model(file: PlanFile, graph: ModelGraph, subject: str) -> None:
    """Refuses a model other than the plan's with the first parameter, input or operation that differs."""
    if file.model.fingerprint == model_fingerprint(graph):
        return
    problem = next(model_differences(file, graph), None)
    if problem is None:
        problem = (
            "names and shapes agree with the plan, but the operations or their wiring differ: fingerprint "
            f"{file.model.fingerprint[:12]} in the plan, {model_fingerprint(graph)[:12]} now"
        )
    other = file.job.recipe != graph.recipe and file.model.name == graph.name
    alone = other and next(parameter_differences(file, graph), None) is None
    remedy = f"Compile with recipe={file.job.recipe!r}, or search again with --recipe {graph.recipe}."
    raise PlanError(subject, f"made for another model: {problem}", remedy if alone else REPLAN)


def model_differences(file: PlanFile, graph: ModelGraph) -> Iterator[str]:
    """What differs between the plan and `graph`, most telling first: class, recipe, parameters, batch, steps."""
    if file.model.name != graph.name:
        yield f"the plan is for {file.model.name}, this is {graph.name}"
    if file.job.recipe != graph.recipe:
        yield f"the plan is for recipe {file.job.recipe}, this was captured for {graph.recipe}"
    yield from parameter_differences(file, graph)
    yield from _input_differences(file, graph)
    yield from step_differences(file, graph)


def parameter_differences(file: PlanFile, graph: ModelGraph) -> Iterator[str]:
    """Parameters that only one of the two has, or has otherwise: shape, number, trainable, name."""
    pieces = {piece.name: (piece, count) for piece, count in graph.pieces()}
    patterns = param_patterns(graph)
    planned = {(p.graph, p.local) for p in file.parameters}
    for p in file.parameters:
        piece, count = pieces.get(p.graph, (None, 0))
        if piece is None or p.local not in piece.params:
            yield f"parameter {p.pattern} {list(p.shape)} is in the plan and not in the model"
            continue
        shape = piece.values[piece.params[p.local]].shape(0)
        if shape != p.shape:
            yield f"parameter {p.pattern} is {list(p.shape)} in the plan and {list(shape)} in the model"
        if count != p.count:
            yield f"parameter {p.pattern} stands for {p.count} tensors in the plan and {count} in the model"
        if p.trainable != (piece.param_grads.get(p.local) is not None):
            words = ("trainable", "frozen") if p.trainable else ("frozen", "trainable")
            yield f"parameter {p.pattern} is {words[0]} in the plan and {words[1]} in the model"
        if patterns[p.graph, p.local] != p.pattern:
            yield f"parameter {p.pattern} of the plan is called {patterns[p.graph, p.local]} in the model"
        ties = further_names(graph, p.graph, p.local)
        if p.aliases != ties:
            then, now = (", ".join(names) or "nothing" for names in (p.aliases, ties))
            yield f"parameter {p.pattern} is tied to {then} in the plan and to {now} in the model"
    for key, pattern in patterns.items():
        if key not in planned:
            piece = pieces[key[0]][0]
            shape = piece.values[piece.params[key[1]]].shape(0)
            yield f"parameter {pattern} {list(shape)} is in the model and not in the plan"


def _input_differences(file: PlanFile, graph: ModelGraph) -> Iterator[str]:
    rows = file.job.global_batch // file.job.micro_batches
    now = {i.name: ([f + p * rows for f, p in zip(i.fixed, i.per_row, strict=True)], i.dtype) for i in graph.inputs}
    then = {i.name: (list(i.shape), i.dtype) for i in file.inputs}
    for name in (*then, *(n for n in now if n not in then)):
        if then.get(name) != now.get(name):
            yield f"input {name} is {_tensor(then.get(name))} in the plan and {_tensor(now.get(name))} for the model"


def _tensor(found: tuple[list[int], str] | None) -> str:
    return "absent" if found is None else f"{found[0]} {found[1]}"


def step_differences(file: PlanFile, graph: ModelGraph) -> Iterator[str]:
    """Steps that the plan places and the model does not have."""
    pieces = {piece.name: piece for piece, _ in graph.pieces()}
    for name, placed in file.placements.items():
        if name not in pieces:
            yield f"the plan places the steps of {name}, which the model does not have"
            continue
        known = {step.name for step in pieces[name].steps} | set(pieces[name].values)
        for step in placed:
            if step not in known:
                yield f"the plan places step {step} of {name}, which the model does not have"
