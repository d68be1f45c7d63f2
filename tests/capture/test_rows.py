"""Sizes are affine in rows: the graph at any row count is the trace at that row count."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from hpsearch.capture import captured as captured_module
from hpsearch.capture.at_rows import _number, at_rows
from hpsearch.capture.captured import capture
from hpsearch.capture.read import Rows
from hpsearch.errors import CaptureError
from tests.capture.interpreter import Interpreter
from tests.capture.models import FAMILIES
from tests.capture.test_families import _in_recipe, plain_step


@pytest.mark.parametrize("name", ["gpt2", "llama", "convnet"])
def test_equals_a_trace_at_those_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES[name]()
    derived = capture(case.model, case.batch, loss=case.loss, rows=6)
    monkeypatch.setattr(captured_module, "READ_ROWS", Rows(6, 8))
    traced = capture(case.model, case.batch, loss=case.loss, rows=6)
    assert list(derived.fx) == list(traced.fx)
    for piece, graph in traced.fx.items():
        for a, b in zip(derived.fx[piece].nodes, graph.nodes, strict=True):
            assert a.format_node() == b.format_node()
            for x, y in zip(pytree.tree_leaves(a.meta.get("val")), pytree.tree_leaves(b.meta.get("val")), strict=True):
                if isinstance(x, torch.Tensor):
                    assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_one_row_has_the_same_graph() -> None:
    torch.manual_seed(0)
    case = _in_recipe(FAMILIES["gpt2"]())
    case.batch = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in case.batch.items()}
    captured = capture(case.model, case.batch, recipe="fp64")
    assert captured.rows == 1
    batch = {**case.batch, "num_items_in_batch": torch.tensor(5)}
    loss, grads = plain_step(case, batch)
    interpreter = Interpreter(captured, case.model)
    torch.testing.assert_close(interpreter.run(captured.batch.flatten(batch)), loss, rtol=1e-6, atol=0)
    for fqn, grad in grads.items():
        torch.testing.assert_close(interpreter.grads[fqn], grad, rtol=1e-6, atol=1e-12)


def test_numbers_that_do_not_follow_the_rows_are_refused() -> None:
    rows = Rows(2, 4)
    assert [_number("n", rows, 6, *pair) for pair in ((8, 16), (9, 17), (0.5, 0.25), (1.0, 2.0), (3, 3))] == [
        24, 25, pytest.approx(1 / 6), 3.0, 3,
    ]  # fmt: skip
    for pair in ((4, 16), (9, 16), (16, 8), (0.5, 0.3)):
        with pytest.raises(CaptureError, match="found"):
            _number("n", rows, 6, *pair)
    graphs = []
    for op in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
        graph = torch.fx.Graph()
        graph.output(graph.call_function(op, (graph.placeholder("x"),), name="y"))
        graphs.append(graph)
    with pytest.raises(CaptureError, match="same operators for every batch size"):
        at_rows("outer", *graphs, rows, 6)


def test_a_number_that_only_seems_to_follow_the_rows_is_refused() -> None:
    # log 4 is twice log 2: traced at 2 and at 4 rows it would be taken for a number in proportion to the rows.
    with pytest.raises(CaptureError, match="expected a number in proportion to the rows"):
        capture(torch.nn.Linear(3, 3), (torch.zeros(8, 3),), loss=lambda o, _: o.square().mean() * math.log(len(o)))
