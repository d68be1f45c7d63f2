"""The local half of a redistribution: what happens to a rank's own tensor before and after a collective.

Emitted programs call these by name. Pieces along a dim follow torch.chunk: equal pieces of ceil(n / size) elements,
the last ones shorter or empty. Collectives work on dim 0 of contiguous tensors, so `split` and `join` move a dim there
and back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def split(x: Tensor, dim: int, size: int) -> Tensor:
    """The `size` equal pieces of `x` along `dim`, one after another on dim 0; contiguous."""
    if dim == 0:
        return x.contiguous()
    return torch.cat(x.tensor_split(size, dim), 0).contiguous()  # cat keeps the strides of permuted pieces


def join(x: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of `split`: `size` pieces that follow each other on dim 0 become one tensor along `dim`."""
    if dim == 0:
        return x
    return torch.cat(x.tensor_split(size, 0), dim)


def cut(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Piece `index` of the `size` pieces of `x` along `dim`; contiguous, possibly empty."""
    piece = -(-x.shape[dim] // size)
    start = min(index * piece, x.shape[dim])
    return x.narrow(dim, start, min(piece, x.shape[dim] - start)).contiguous()


def cut_rows(x: Tensor, dim: int, index: int, size: int, row: int, head_tail: bool) -> Tensor:
    """This rank's piece of every sequence along `dim`, which has `row` elements for each: the `index`-th of `size`, or,
    head-tail, pieces `index` and `2 size - 1 - index` of twice as many; contiguous."""
    rows = x.unflatten(dim, (-1, row))
    if not head_tail:
        return rows.narrow(dim + 1, index * (row // size), row // size).flatten(dim, dim + 1).contiguous()
    piece = row // (2 * size)
    ends = [rows.narrow(dim + 1, at * piece, piece) for at in (index, 2 * size - 1 - index)]
    return torch.cat(ends, dim + 1).flatten(dim, dim + 1).contiguous()


def split_rows(x: Tensor, dim: int, size: int, row: int, head_tail: bool) -> Tensor:
    """`cut_rows` of all ranks, one after another on dim 0; contiguous."""
    return torch.cat([cut_rows(x, dim, index, size, row, head_tail) for index in range(size)], 0)


def join_rows(x: Tensor, dim: int, size: int, row: int, head_tail: bool) -> Tensor:
    """The inverse of `split_rows`."""
    pieces = [piece.unflatten(dim, (-1, row // size)) for piece in x.tensor_split(size, 0)]
    if head_tail:
        ends = [piece.tensor_split(2, dim + 1) for piece in pieces]
        pieces = [head for head, _ in ends] + [tail for _, tail in reversed(ends)]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)


def mask(x: Tensor, index: int) -> Tensor:
    """`x` as an addend: itself on the first rank of the axis, zeros on the others."""
    return x if index == 0 else torch.zeros_like(x)


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` with zeros behind it along `dim`, up to `length` elements; contiguous."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim).contiguous()


def trim(x: Tensor, dim: int, length: int) -> Tensor:
    """The first `length` elements of `x` along `dim`; contiguous."""
    return x.narrow(dim, 0, length).contiguous()


def extent(coordinate: Mapping[str, int], length: int, cuts: Mapping[str, int]) -> int:
    """Elements left of `length` on this rank when each axis of `cuts` (name → size, outermost first) cuts in turn."""
    for axis, size in cuts.items():
        piece = -(-length // size)
        length = max(0, min(piece, length - coordinate[axis] * piece))
    return length
