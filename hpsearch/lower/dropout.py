"""Dropout whose masks are the same under every layout: numbers are a function of what they are for, not of who draws.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter
and a key into four numbers. The key is the seed; the counter says which four elements of which op in which step. An
element is named by its place in the tensor of the whole batch: cut over ranks, split in micro-batches, or computed a
second time, it gets the same number.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpsearch.layout import ROLES
from hpsearch.lower.local_ops import cut, cut_rows

Dim = tuple[int, int, tuple[str, ...]]
"""Of a tensor of one micro-batch on all ranks: its size, elements for each row of the batch (0: of no row), and the
axes that cut it, outermost first."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: Sequence[Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit numbers, as int64, for every counter of four words (tensors that broadcast) under one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the product of two words. In int64 it wraps around, which its bits do not show."""
    product = b * a
    return (product >> 32) & WORD, product & WORD


@dataclass
class Clock:
    """The seed of a run, and which step it is at."""

    seed: int = 0
    step: int = 0


class Draws:
    """What is being computed on this rank when numbers are drawn. The state is a tensor, so that compiled code reads it
    and is not compiled again when it changes."""

    def __init__(
        self,
        coordinate: Mapping[str, int],
        sizes: Mapping[str, int],
        data_ranks: int,
        micro_batches: int,
        device: torch.device | str = "cpu",
        head_tail: bool = False,
    ) -> None:
        """`coordinate`, `sizes`: of every mesh axis; `data_ranks`: pieces of the batch, of `micro_batches` each;
        `head_tail`: the order of sequences (`layout.HEAD_TAIL`)."""
        self.head_tail = head_tail
        self.coordinate, self.sizes = dict(coordinate), dict(sizes)
        self.data_ranks, self.micro_batches = data_ranks, micro_batches
        self.state = torch.zeros(5, dtype=torch.int64, device=device)
        """Low and high word of the seed, step, micro-batch, block."""
        self._now: tuple[int, int, int, str] = (-1, -1, -1, "")

    def at(self, seed: int, step: int, micro_batch: int, block: str) -> None:
        """`block`: its name in the model; empty outside blocks."""
        if self._now != (seed, step, micro_batch, block):
            self._now = seed, step, micro_batch, block
            words = [seed & WORD, seed >> 32 & WORD, step & WORD, micro_batch, zlib.crc32(block.encode())]
            self.state.copy_(torch.tensor(words))

    def whole(self, dim: Dim) -> int:
        """Size along `dim` of the tensor of the whole batch."""
        size, per_row, _ = dim
        return size * self.micro_batches if per_row else size

    def start(self, dim: Dim) -> int:
        """Place of this rank's first element along `dim`, on all ranks in one micro-batch."""
        start, piece, axes = 0, dim[0], dim[2]
        for axis in axes:
            piece //= self.sizes[axis]
            start += self.coordinate[axis] * piece
        return start

    def places(self, dim: Dim, local: int) -> Tensor:
        """Of this rank's `local` elements along `dim`: their places along that dim in the tensor of the whole batch."""
        size, per_row, axes = dim
        if _cuts_sequences(axes):
            here = self._kept(dim)
        else:
            here = torch.arange(local, device=self.state.device) + self.start(dim)
        if not per_row:
            return here
        rows = size // per_row // self.data_ranks  # of one data rank in one micro-batch
        row, inside = here // per_row, here % per_row
        rank, row = row // rows, row % rows
        return ((rank * self.micro_batches + self.state[3]) * rows + row) * per_row + inside

    def _kept(self, dim: Dim) -> Tensor:
        """Places in one micro-batch on all ranks, some axis cutting inside rows."""
        size, per_row, axes = dim
        here = torch.arange(size, device=self.state.device)
        for axis in axes:
            place, pieces = self.coordinate[axis], self.sizes[axis]
            if _cuts_sequences((axis,)):
                here = cut_rows(here, 0, place, pieces, per_row or len(here), self.head_tail)
            else:
                here = cut(here, 0, place, pieces)
        return here


def _cuts_sequences(axes: Sequence[str]) -> bool:
    return any(ROLES.get(axis) == "sequence" for axis in axes)


def dropout(x: Tensor, p: float, draws: Draws, op: int, dims: Sequence[Dim]) -> tuple[Tensor, Tensor]:
    """(x with a share `p` of its elements zero and the others times 1 / (1 - p), mask of the others).

    `op`: a number of the op that no other op of its block has (`number_of`). `dims`: of `x`, dim by dim.
    """
    if p == 0.0 or p == 1.0:
        mask = torch.full_like(x, p == 0.0, dtype=torch.bool)
        return x * mask, mask
    numbers = _numbers(x, draws, op, dims) if dims else _numbers(x.reshape(1), draws, op, ((1, 0, ()),)).reshape(())
    mask = numbers >= round(p * (WORD + 1))
    return x * mask * (1.0 / (1.0 - p)), mask


def number_of(op: str) -> int:
    return zlib.crc32(op.encode())


def _numbers(x: Tensor, draws: Draws, op: int, dims: Sequence[Dim]) -> Tensor:
    """A 32-bit number for every element of `x`: four neighbours along the last dim share a counter."""
    index = torch.zeros((1,) * x.dim(), dtype=torch.int64, device=x.device)
    for position, (dim, local) in enumerate(zip(dims[:-1], x.shape[:-1], strict=True)):
        shape = [-1 if i == position else 1 for i in range(x.dim())]
        index = index * draws.whole(dim) + draws.places(dim, local).reshape(shape)
    last = dims[-1]
    index = index * ((draws.whole(last) + 3) // 4)
    key = draws.state[0], draws.state[1]

    def words(counters: Tensor) -> tuple[Tensor, ...]:
        return philox((counters & WORD, counters >> 32, draws.state[4] ^ op, draws.state[2]), key)

    if last[1] or _cuts_sequences(last[2]):  # rows of several micro-batches lie between those of this one
        places = draws.places(last, x.shape[-1])
        four, which = torch.stack(torch.broadcast_tensors(*words(index + places // 4))), places % 4
        return four.gather(0, which.expand(x.shape).unsqueeze(0)).squeeze(0)
    first, count = draws.start(last), x.shape[-1]
    quads = torch.arange(first // 4, (first + count + 3) // 4, device=x.device)
    four = torch.stack(torch.broadcast_tensors(*words(index + quads)), dim=-1).flatten(-2)
    return four.narrow(-1, first % 4, count)
