"""The same graph at another number of rows, without tracing again.

Two traces at different row counts agree in everything but sizes. A size, and any number baked into an argument, is then
`fixed + per_row·rows`; a float may also be `c / rows` (the factor of a mean). Node names stay, whatever the row count:
tracing at one row would drop the sums over a batch dim of size 1.
"""

from __future__ import annotations

from math import isclose
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hpsearch.capture.read import Rows, matched
from hpsearch.errors import CaptureError


def at_rows(name: str, first: fx.Graph, second: fx.Graph, rows: Rows, count: int) -> fx.Graph:
    """A graph at `count` rows from graphs at `rows.first` and `rows.second` rows.

    Raises CaptureError where a number follows the rows in neither way.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for a, b in matched(name, first, second):
        leaves_a, spec = pytree.tree_flatten((a.args, a.kwargs))
        leaves_b = pytree.tree_leaves((b.args, b.kwargs))
        leaves = [
            copies[x] if isinstance(x, fx.Node) else _number(f"{name}.{a.name}", rows, count, x, y)
            for x, y in zip(leaves_a, leaves_b, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        copies[a] = graph.create_node(a.op, a.target, tuple(args), dict(kwargs), a.name)
        copies[a].meta = {key: value for key, value in a.meta.items() if key != "val"}
        if "val" in a.meta:
            copies[a].meta["val"] = pytree.tree_map(
                lambda x, y: _value(rows, count, x, y), a.meta["val"], b.meta["val"]
            )
    return graph


def _number(subject: str, rows: Rows, count: int, first: Any, second: Any) -> Any:
    """The number that is `first` and `second` at the two row counts, at `count` rows."""
    if first == second or not isinstance(first, (int, float)) or isinstance(first, bool):
        return first
    if isinstance(first, int):
        fixed, per_row = rows.affine(subject, first, second)
        return fixed + per_row * count
    if isclose(first * rows.first, second * rows.second, rel_tol=1e-12):
        return first * rows.first / count
    per = (second - first) / (rows.second - rows.first)
    if isclose(first, per * rows.first, rel_tol=1e-12):
        return per * count
    raise CaptureError(
        subject,
        f"expected a number in proportion to the rows, but found {first} at {rows.first} and {second} at {rows.second}",
        "Pass it as a tensor of the batch.",
    )


def _value(rows: Rows, count: int, first: Any, second: Any) -> Any:
    if not isinstance(first, torch.Tensor):
        return first
    shape, strides = (
        [f + p * count for f, p in (rows.affine("tensor", x, y) for x, y in zip(a, b, strict=True))]
        for a, b in ((first.shape, second.shape), (first.stride(), second.stride()))
    )
    with first.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)
