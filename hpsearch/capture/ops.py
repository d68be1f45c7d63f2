"""The operators of our own that may stand in a captured graph.

    hpsearch::einsum(str equation, Tensor a, Tensor b) -> Tensor      a contraction, restored from view-mm-view
    hpsearch::block(Tensor[] inputs, int call) -> Tensor[]            a repeated module in the outer graph
    hpsearch::block_backward(Tensor[] tangents, int call) -> Tensor[] its backward

`einsum` is real and runs; the other two only stand for a block while the outer graph is traced, and lowering puts the
block's own code in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from hpsearch.errors import InternalError

LIBRARY = torch.library.Library("hpsearch", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define("einsum(str equation, Tensor a, Tensor b) -> Tensor", tags=TAGS)
LIBRARY.define("block(Tensor[] inputs, int call) -> Tensor[]", tags=TAGS)
LIBRARY.define("block_backward(Tensor[] tangents, int call) -> Tensor[]", tags=TAGS)


@dataclass(frozen=True)
class Contraction:
    """An equation taken apart: each operand is (free, contracted) or (contracted, free) letters."""

    a_contracted_first: bool
    b_contracted_first: bool
    a_free: int
    """How many letters of a are free; they come first in the result, those of b after them."""
    b_free: int


@cache
def contraction(equation: str) -> Contraction:
    """The form of `equation`; InternalError for what is not one matrix product on grouped dims."""
    operands, _, out = equation.partition("->")
    a, _, b = operands.partition(",")
    shared = "".join(c for c in a if c in b)
    a_free = "".join(c for c in a if c not in b)
    b_free = "".join(c for c in b if c not in a)
    a_fits, b_fits = a in (a_free + shared, shared + a_free), b in (b_free + shared, shared + b_free)
    if not (a_fits and b_fits and out == a_free + b_free and shared):
        raise InternalError(f"einsum {equation!r}", "expected free and contracted letters side by side in each operand")
    return Contraction(a != a_free + shared, b != b_free + shared, len(a_free), len(b_free))


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One matrix product; operands are reshaped (a view when contiguous) and transposed by stride, never permuted."""
    form = contraction(equation)
    a_free, left = _matrix(a, form.a_free, form.a_contracted_first)
    b_free, right = _matrix(b, form.b_free, form.b_contracted_first)
    return torch.mm(left, right.t()).view(a_free + b_free)


def _matrix(x: torch.Tensor, free: int, contracted_first: bool) -> tuple[list[int], torch.Tensor]:
    """The free sizes of `x`, and `x` as a matrix (free, contracted)."""
    shape = list(x.shape)
    if contracted_first:
        cut = len(shape) - free
        kept = shape[cut:]
        return kept, x.reshape(prod(shape[:cut]), prod(kept)).t()
    kept = shape[:free]
    return kept, x.reshape(prod(kept), prod(shape[free:]))


LIBRARY.impl("einsum", einsum, "CompositeExplicitAutograd")


@torch.library.register_fake("hpsearch::einsum", lib=LIBRARY)
def _einsum_fake(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    form = contraction(equation)
    a_free = a.shape[a.dim() - form.a_free :] if form.a_contracted_first else a.shape[: form.a_free]
    b_free = b.shape[b.dim() - form.b_free :] if form.b_contracted_first else b.shape[: form.b_free]
    return a.new_empty((*a_free, *b_free))


TensorForm = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""

ANCHOR: TensorForm = (torch.Size(()), (), torch.float32)
"""What `block_backward` returns for a block none of whose inputs wants a gradient, so that the trace keeps it."""


@dataclass
class CallForm:
    """What the outer trace must know of one call of a block."""

    outputs: tuple[TensorForm, ...] = ()
    input_grads: tuple[TensorForm, ...] = ()


_calls: list[CallForm] = []


@contextmanager
def calls_known(calls: Sequence[CallForm]) -> Iterator[None]:
    """While this is open, `block(…, i)` and `block_backward(…, i)` have the result forms of `calls[i]`."""
    saved = list(_calls)
    _calls[:] = calls
    try:
        yield
    finally:
        _calls[:] = saved


@torch.library.register_fake("hpsearch::block", lib=LIBRARY)
def _block_fake(inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [torch.empty_strided(s, st, dtype=d, device="cpu") for s, st, d in _calls[call].outputs]


@torch.library.register_fake("hpsearch::block_backward", lib=LIBRARY)
def _block_backward_fake(tangents: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    forms = _calls[call].input_grads or (ANCHOR,)
    return [torch.empty_strided(s, st, dtype=d, device="cpu") for s, st, d in forms]
