"""Products in 8 bits: operands divided by scales, rounded to E4M3 or E5M2, multiplied, and scaled back.

`amax` and `scaled_einsum` are functions of the emitted program; where an axis cuts what a product sums over, the
largest elements of its pieces meet between the two. On devices with such a matmul it is torch._scaled_mm with a scale a
row; elsewhere the rounded operands are multiplied in fp32, which gives the same but for the order of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpsearch.capture.ops import einsum
from hpsearch.graph import Op, OpGraph
from hpsearch.graph.scaled import Formats, scale_messages, summed_dims
from hpsearch.layout import Mesh
from hpsearch.lower.statement import LocalValue, Sent, Statement

LEAST = 1e-12
"""Of a scale's largest element: a slice of zeros stays zeros."""
MULTIPLE = 16
"""What torch._scaled_mm wants sizes to be multiples of."""


def amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest absolute value of each slice along the other dims, fp32; `dims` stay with size 1. Contiguous."""
    return x.abs().amax(dims, keepdim=True).float().contiguous()


def rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits, and what one of its units is worth."""
    unit = largest.clamp(min=LEAST) / torch.finfo(dtype).max
    top = torch.finfo(dtype).max
    return (x.float() / unit).clamp(-top, top).to(dtype), unit


def scaled_einsum(
    equation: str, a: Tensor, b: Tensor, a_max: Tensor, b_max: Tensor, formats: tuple[torch.dtype, torch.dtype]
) -> Tensor:
    """The product `equation` of two operands in 8 bits, in the dtype of `a`."""
    a8, a_unit = rounded(a, a_max, formats[0])
    b8, b_unit = rounded(b, b_max, formats[1])
    if _has_kernel(a):
        found = _by_kernel(equation, a8, b8, a_unit, b_unit, a.dtype)
        if found is not None:
            return found
    return einsum(equation, a8.float() * a_unit, b8.float() * b_unit).to(a.dtype)


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _by_kernel(
    equation: str, a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """As one matrix product; None where sizes do not suit the kernel."""
    operands, _, out = equation.partition("->")
    left, _, right = operands.partition(",")
    summed = [letter for letter in left if letter not in out]
    rows, columns = ([c for c in side if c in out] for side in (left, right))
    if "".join(rows + columns) != out:
        return None
    first, first_unit = (_matrix(t, left, rows, summed) for t in (a, a_unit))
    second, second_unit = (_matrix(t, right, columns, summed) for t in (b, b_unit))
    if any(size % MULTIPLE for size in (*first.shape, *second.shape)):
        return None
    made = torch._scaled_mm(first, second.t(), first_unit, second_unit.t(), out_dtype=dtype, use_fast_accum=False)
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    return made.reshape([sizes[letter] for letter in out])


def _matrix(x: Tensor, side: str, kept: list[str], summed: list[str]) -> Tensor:
    """[kept, summed], contiguous."""
    moved = x.permute([side.index(letter) for letter in (*kept, *summed)])
    rows = 1
    for letter in kept:
        rows *= x.shape[side.index(letter)]
    return moved.reshape(rows, -1).contiguous()


def emit_scaled(
    graph: OpGraph, op: Op, formats: Formats, operands: list[LocalValue], rows: int, name: str, mesh: Mesh
) -> list[Statement]:
    """The statements of one product, which writes `name`."""
    found: list[Statement] = []
    maxima = []
    messages = list(scale_messages(graph, op, [operand.layout for operand in operands], rows, mesh.sizes))
    for index, operand in enumerate(operands):
        largest = f"{name}__amax{index}"
        text = f"{largest} = amax({operand.name}, {summed_dims(op, index)})"
        found.append(Statement((largest,), text, (operand.name,), op.phase, "op"))
        for axis, nbytes in ((c.axis, c.nbytes) for place, c in messages if place == index):
            what, sent, met = f"{graph.name}/{op.name}", f"{largest}__{axis}_sent", f"{largest}__{axis}"
            text = f'{sent} = c10d.all_reduce({largest}, "max", groups["{axis}"])'
            told = Sent("all_reduce", axis, what, "float32", nbytes)
            found.append(Statement((sent,), text, (largest,), op.phase, "issue", f"{what} scale", told))
            found.append(Statement((met,), f"{met} = c10d.wait_tensor({sent})", (sent,), op.phase, "wait"))
            largest = met
        maxima.append(largest)
    words = ", ".join(f"torch.{dtype}" for dtype in formats)
    a, b = operands
    text = f"{name} = scaled_einsum({op.equation!r}, {a.name}, {b.name}, {maxima[0]}, {maxima[1]}, ({words}))"
    found.append(Statement((name,), text, (a.name, b.name, *maxima), op.phase, "op", op=op.name))
    return found
