"""What attention over a cut sequence sends, by how its ranks see each other's keys.

    gathered   keys and values of all ranks; backward gathers them again and scatters their gradients
    ring       keys and values pass from rank to rank, n - 1 times; in backward their gradients too, n times
    ulysses    heads for positions: queries, keys, values there, results back; backward likewise

Keys and values with too few heads for ulysses are repeated until every rank has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpsearch.graph import ITEM_BYTES, Op, OpGraph
from hpsearch.layout import Collective, Layout, Mesh

Message = tuple[Collective, str]
"""A collective, and the dtype of what it carries."""
_HEADS = 1


def is_attention(op: Op) -> bool:
    """Whether the op is a fused attention, which has the rules of `sequence.attention_rule`."""
    return op.kind == "attention" and "scaled_dot_product" in op.target


def head_repeats(queries: int, keys: int, ranks: int) -> int | None:
    """How often each head of keys is repeated so that `ranks` get equally many whole groups of heads; None if never."""
    if queries % ranks or queries % keys:
        return None
    group = queries // keys
    return next((r for r in range(1, group + 1) if group % r == 0 and keys * r % ranks == 0), None)


def attention_messages(
    graph: OpGraph, op: Op, layouts: Sequence[Layout], rows: int, mesh: Mesh
) -> tuple[Message, ...] | None:
    """The messages of one run of an attention op, in order, when its operands lie as `layouts` say.

    `rows`: of a micro-batch on all ranks. Empty where cp does not cut it; None where heads cannot be exchanged.
    """
    axis = next((a for a in mesh.axes if a.exchange), None)
    if axis is None or not is_attention(op) or not layouts[0][axis.name].is_shard:
        return ()
    values = [graph.values[name] for name in op.inputs]
    shapes = [layout.local_shape(value.shape(rows), mesh.sizes) for value, layout in zip(values, layouts, strict=True)]
    dtypes = [value.dtype for value in values]
    first = 0 if op.phase == "forward" else 1
    heads = [shape[_HEADS] for shape in shapes[first : first + 2]]
    if axis.exchange == "ulysses" and head_repeats(heads[0], heads[1], axis.size) is None:
        return None
    return tuple((Collective(kind, axis.name, n), dtype) for kind, n, dtype in _messages(
        axis.exchange, axis.size, op.phase, shapes, dtypes
    ))  # fmt: skip


def _messages(
    exchange: str, ranks: int, phase: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> list[tuple[str, int, str]]:
    """(kind, bytes, dtype); tensors in the order of the op: q, k, v, or gradient, q, k, v, out, log-sum-exp."""
    sizes = [_count(shape) * ITEM_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True)]
    ahead = phase == "forward"
    first = 0 if ahead else 1
    k, v = first + 1, first + 2
    if exchange == "gathered":
        found = [("all_gather", sizes[i] * ranks, dtypes[i]) for i in (k, v)]
        return found if ahead else found + [("reduce_scatter", sizes[i] * ranks, dtypes[i]) for i in (k, v)]
    if exchange == "ring":
        blocks = [("shift", sizes[k] + sizes[v], dtypes[k])] * (ranks - 1)
        summed = sum_dtype(dtypes[k])
        nbytes = (_count(shapes[k]) + _count(shapes[v])) * ITEM_BYTES[summed]
        return blocks if ahead else _alternating(blocks, [("shift", nbytes, summed)] * ranks)
    repeats = head_repeats(shapes[first][_HEADS], shapes[k][_HEADS], ranks) or 1
    times = {k: repeats, v: repeats}
    there = [("all_to_all", sizes[i] * times.get(i, 1), dtypes[i]) for i in range(3 if ahead else 6)]
    if ahead:
        out = _count(shapes[0][:-1]) * shapes[v][-1] * ITEM_BYTES[dtypes[0]]
        lse = sum_dtype(dtypes[0])
        return [*there, ("all_to_all", out, dtypes[0]), ("all_to_all", _count(shapes[0][:-1]) * ITEM_BYTES[lse], lse)]
    return there + there[1:4]


def _alternating(blocks: list[tuple[str, int, str]], sums: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    found = []
    for i, added in enumerate(sums):
        found += [*blocks[i : i + 1], added]
    return found


def sum_dtype(dtype: str) -> str:
    """In which dtype results of blocks are added, and what log-sum-exps have."""
    return "float32" if ITEM_BYTES[dtype] < 4 else dtype


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
