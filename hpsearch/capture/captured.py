"""`capture(model, batch)`: the door of this room."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from hpsearch.capture import huggingface
from hpsearch.capture.at_rows import at_rows
from hpsearch.capture.batch import COUNT, Batch, Leaf, Loss
from hpsearch.capture.delta_rule import delta_rule_as_one_op
from hpsearch.capture.experts import experts_as_ops
from hpsearch.capture.loss import loss_of
from hpsearch.capture.masks import with_masks
from hpsearch.capture.piece import Piece, block_input_names, drop_call_inputs, make_piece
from hpsearch.capture.read import Rows, read_graph
from hpsearch.capture.scope import one_graph
from hpsearch.capture.trace import Traced, trace
from hpsearch.capture.twin import COMPUTE_DTYPE, make_twin
from hpsearch.graph import Input, ModelGraph, Param

READ_ROWS = Rows(2, 6)
"""Row counts at which sizes are read. Even, and not 1, so that nothing is traced as a special case; not 2 and 4, whose
logarithms are in proportion too."""


@dataclass(frozen=True)
class CapturedGraph:
    """A `ModelGraph` and the fx graphs it was read from, at `rows` rows."""

    graph: ModelGraph
    fx: dict[str, fx.Graph]
    """`outer` and each block class, in normal form; node names equal step and value names."""
    batch: Batch
    """Structure of the batch; `batch.flatten(b)` gives the tensors in the order of `graph.inputs`."""
    rows: int

    @property
    def input_spec(self) -> pytree.TreeSpec:
        return self.batch.spec


def capture(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    recipe: str = "bf16",
    rows: int | None = None,
    per_row: Mapping[str, int] | None = None,
) -> CapturedGraph:
    """Captures one training step of `model` on batches shaped like `batch`. Nothing real is read or written.

    model: on any device, meta included; left as it is. Parameters are taken in the recipe's compute dtype.
    batch: mapping (keyword arguments) or tuple (positional arguments) of tensors, nested or not; only shapes and dtypes
        matter. Tensors with as many elements in dim 0 as the first tensor follow the rows; `per_row` names packed ones.
    loss: `loss(outputs, batch)` → scalar; without it the model's own (`outputs.loss`, or a scalar output).
    rows: rows of the fx graphs; by default those of `batch`.

    Raises CaptureError where the step is not one graph, naming the line.
    """
    form = Batch.of(batch, COMPUTE_DTYPE.get(recipe, torch.float32), per_row)
    counts = loss is None and _takes_count(model, form)
    if counts:
        form = _with_count(form)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = make_twin(model, mode, recipe)
    rows = form.rows if rows is None else rows
    with mode, one_graph(), huggingface.tracing(twin, form), delta_rule_as_one_op(twin), experts_as_ops():
        one = trace(twin, form.fakes(READ_ROWS.first), form.step(loss))
        two = trace(twin, form.fakes(READ_ROWS.second), form.step(loss), like=one)
    first, second = _pieces(one, form), _pieces(two, form)
    if counts and not _node(first["outer"], COUNT).users:
        form, counts = _without_count(form), False
        _drop_count(first["outer"])
        _drop_count(second["outer"])
    graph = _read(twin, form, first, second, tuple(one.instances), recipe)
    at_first, at_second = ({name: piece.graph for name, piece in pieces.items()} for pieces in (first, second))
    reduction, targets = loss_of(graph, at_first, at_second, READ_ROWS)
    graph = replace(graph, name=type(model).__name__, loss_reduction=reduction, targets=targets)
    graph = replace(graph, limits=huggingface.limits(model))
    graph = with_masks(graph, twin, at_first)
    graphs = {name: at_rows(name, p.graph, second[name].graph, READ_ROWS, rows) for name, p in first.items()}
    return CapturedGraph(graph, graphs, form, rows)


def _takes_count(model: nn.Module, batch: Batch) -> bool:
    """Whether a Hugging Face loss may take the count of valid targets as an input; the trace shows whether it does."""
    if batch.spec.type is not dict or COUNT in {leaf.name for leaf in batch.leaves}:
        return False
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    is_offered = hasattr(model, "loss_function") and getattr(model, "accepts_loss_kwargs", True)
    return COUNT in parameters or (takes_any and bool(is_offered))


def _with_count(form: Batch) -> Batch:
    skeleton = pytree.tree_unflatten(list(form.values), form.spec) | {COUNT: Leaf(COUNT, (), (), torch.int64)}
    values, spec = pytree.tree_flatten(skeleton)
    return Batch(tuple(values), spec, form.rows)


def _without_count(form: Batch) -> Batch:
    skeleton = pytree.tree_unflatten(list(form.values), form.spec)
    del skeleton[COUNT]
    values, spec = pytree.tree_flatten(skeleton)
    return Batch(tuple(values), spec, form.rows)


def _node(piece: Piece, name: str) -> fx.Node:
    return next(n for n in piece.graph.nodes if n.name == name)


def _drop_count(outer: Piece) -> None:
    outer.graph.erase_node(_node(outer, COUNT))
    position = outer.inputs.index(COUNT)
    for ends in (outer.inputs, outer.input_grads):
        del ends[position]


def _pieces(traced: Traced, form: Batch) -> dict[str, Piece]:
    """`outer` and each block class, in normal form."""
    pieces: dict[str, Piece] = {}
    for name, joint in traced.blocks.items():
        record = traced.first[name]
        pieces[name] = make_piece(joint, "block.", block_input_names(record), traced.needs[name], keep_inputs=False)
    kept = {call: pieces[name].kept for call, (name, _) in enumerate(traced.instances)}
    drop_call_inputs(traced.outer.graph, kept)
    names = [leaf.name for leaf in form.leaves]
    outer = make_piece(traced.outer, "model.", names, (False,) * len(names), keep_inputs=True)
    return {"outer": outer, **pieces}


def _read(
    twin: nn.Module,
    form: Batch,
    first: dict[str, Piece],
    second: dict[str, Piece],
    calls: tuple[tuple[str, str], ...],
    recipe: str,
) -> ModelGraph:
    graphs = {name: read_graph(name, piece, second[name], READ_ROWS, calls) for name, piece in first.items()}
    inputs = tuple(Input(x.name, x.fixed, x.per_row, str(x.dtype).removeprefix("torch.")) for x in form.leaves)
    outer = graphs.pop("outer")
    return ModelGraph("", outer, graphs, calls, _params(twin), inputs, "", recipe, rows=READ_ROWS.first)


def _params(twin: nn.Module) -> dict[str, Param]:
    names: dict[int, list[str]] = {}
    for fqn, tensor in twin.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(fqn)
    found = {}
    for fqn, tensor in twin.named_parameters():
        dtype = str(tensor.dtype).removeprefix("torch.")
        aliases = tuple(names[id(tensor)][1:])
        found[fqn] = Param(fqn, tuple(tensor.shape), dtype, tensor.requires_grad, aliases)
    return found
