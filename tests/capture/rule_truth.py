"""Which sharding rules of an op are true, by brute force on real tensors.

Inputs are cut by hand as every combination of placements says, the local op (exactly what lowering runs, `localize`)
is run on each piece, and each output is compared with the global result in every placement. Several ranks are a list
in one process. Floating tensors are float64 whatever the traced dtype.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch

from hpsearch.capture.op_facts import OpFacts, TensorFacts, output_slots
from hpsearch.graph import Rule
from hpsearch.lower.localize import is_sized, localize

RANKS = (2, 3)
Maker = Callable[[OpFacts, torch.Generator], list[torch.Tensor]]


def true_rules(facts: OpFacts, ranks: int, maker: Maker | None = None) -> set[Rule]:
    """Every rule whose cuts all divide by `ranks` and that holds; two examples where coincidences are likely."""
    seeds = (0,) if all(t.dtype.is_floating_point for t in (*facts.inputs, *facts.outputs)) else (0, 1)
    return set.intersection(*(_true_once(facts, ranks, maker or random_inputs, seed) for seed in seeds))


def is_testable(rule: Rule, facts: OpFacts, ranks: int) -> bool:
    """All cuts of the rule divide by `ranks`."""
    pairs = zip((*rule[0], *rule[1]), (*facts.inputs, *facts.outputs), strict=True)
    return all(text[0] != "S" or tensor.shape[int(text[1:])] % ranks == 0 for text, tensor in pairs)


def _true_once(facts: OpFacts, ranks: int, maker: Maker, seed: int) -> set[Rule]:
    generator = torch.Generator().manual_seed(seed)
    tensors = maker(facts, generator)
    whole = run(facts, facts.target, tensors)
    choices = [_choices(t.shape, t.dtype, ranks) for t in tensors]
    if any(t.dtype.is_floating_point for t in tensors):  # integers beside floats are indices; addends of one are none
        choices = [
            c if t.dtype.is_floating_point else [p for p in c if p != "P"]
            for t, c in zip(tensors, choices, strict=True)
        ]
    pieces = [{c: cut(t, c, ranks, generator) for c in cs} for t, cs in zip(tensors, choices, strict=True)]
    found: set[Rule] = set()
    for placements in itertools.product(*choices):
        local = [[pieces[i][p][rank] for i, p in enumerate(placements)] for rank in range(ranks)]
        for outputs in _true_outputs(facts, local, whole, ranks):
            found.add((placements, outputs))
    return found


def _choices(shape: Sequence[int], dtype: torch.dtype, ranks: int) -> list[str]:
    cuts = [f"S{d}" for d, size in enumerate(shape) if size > 1 and size % ranks == 0]
    return ["R", *cuts, *([] if dtype == torch.bool else ["P"])]


def cut(tensor: torch.Tensor, placement: str, ranks: int, generator: torch.Generator) -> list[torch.Tensor]:
    """The pieces that each rank holds; addends are random and add up to the tensor."""
    if placement == "R":
        return [tensor] * ranks
    if placement[0] == "S":
        return [piece.contiguous() for piece in tensor.chunk(ranks, int(placement[1:]))]
    addends = [_noise(tensor, generator) for _ in range(ranks - 1)]
    return [*addends, tensor - reduce(operator.add, addends)]


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return torch.randint(-2, 3, tensor.shape, generator=generator, dtype=tensor.dtype)


def _true_outputs(
    facts: OpFacts, local: list[list[torch.Tensor]], whole: list[torch.Tensor], ranks: int
) -> Iterator[tuple[str, ...]]:
    """Output placements that hold for these local inputs. An op told sizes is run once for each output placement."""
    choices = [_choices(t.shape, t.dtype, ranks) for t in whole]
    seen: dict[object, list[list[torch.Tensor]] | None] = {}
    for outputs in itertools.product(*choices) if is_sized(facts.target) else [None]:
        results = _results(facts, local, whole, outputs or ["R"] * len(whole), ranks, seen)
        if results is None or any(len(r) != len(whole) for r in results):
            continue
        tried = [[p] for p in outputs] if outputs else choices
        held = [[p for p in ps if _holds(p, [r[i] for r in results], whole[i])] for i, ps in enumerate(tried)]
        yield from itertools.product(*held)


def _results(
    facts: OpFacts, local: list[list[torch.Tensor]], whole: list[torch.Tensor], outputs: Sequence[str], ranks: int,
    seen: dict[object, list[list[torch.Tensor]] | None],
) -> list[list[torch.Tensor]] | None:  # fmt: skip
    """The results of every rank, None where the op refuses the pieces; `seen` remembers them by call."""
    shapes = [[tuple(t.shape) for t in inputs] for inputs in local]
    if facts.name in SAFE and not all(SAFE[facts.name](*s) for s in shapes):
        return None
    local_outs = [_local_shape(t.shape, p, ranks) for t, p in zip(whole, outputs, strict=True)]
    try:
        target, args, kwargs = localize(facts.target, facts.args, facts.kwargs, local_outs, shapes[0])
    except (IndexError, ZeroDivisionError):
        return None
    call = OpFacts(target, args, kwargs, facts.inputs, ())
    if call.key not in seen:
        seen[call.key] = _run_all(call, local)
    return seen[call.key]


def _run_all(call: OpFacts, local: list[list[torch.Tensor]]) -> list[list[torch.Tensor]] | None:
    try:
        return [run(call, call.target, inputs) for inputs in local]
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return None


def _holds(placement: str, pieces: list[torch.Tensor], whole: torch.Tensor) -> bool:
    if placement == "P":
        if pieces[0].shape != whole.shape:
            return False
        return close(reduce(operator.add, pieces), whole)
    if placement == "R":
        return all(close(piece, whole) for piece in pieces)
    dim = int(placement[1:])
    expected = whole.chunk(len(pieces), dim)
    return all(close(piece, part) for piece, part in zip(pieces, expected, strict=True))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-10, equal_nan=True)


def _local_shape(shape: Sequence[int], placement: str, ranks: int) -> tuple[int, ...]:
    dim = int(placement[1:]) if placement[0] == "S" else -1
    return tuple(size // ranks if d == dim else size for d, size in enumerate(shape))


def run(facts: OpFacts, target: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The op on these tensors, put where `TensorFacts` stand, as a list of the tensors that exist."""
    torch.manual_seed(0)
    stream = iter(tensors)
    args, kwargs = facts.mapped(lambda _: next(stream))
    result = _call(target)(*_doubled(args), **_doubled(kwargs))
    leaves = result if isinstance(result, (list, tuple)) else (result,)
    return [leaf for leaf, slot in zip(leaves, output_slots(leaves), strict=True) if slot is not None]


def _call(target: Any) -> Any:
    return torch.einsum if str(target) == "hpsearch.einsum.default" else target


def _doubled(arg: Any) -> Any:
    """Floating dtypes among the arguments become float64, as the tensors are."""
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return torch.float64
    if isinstance(arg, (list, tuple)):
        return type(arg)(_doubled(a) for a in arg)
    if isinstance(arg, dict):
        return {key: _doubled(a) for key, a in arg.items()}
    return arg


def random_inputs(facts: OpFacts, generator: torch.Generator) -> list[torch.Tensor]:
    """Positive floats (roots and logarithms stay real), booleans, and small integers that are valid indices."""
    start, below = int(facts.name == "aten.div.Tensor"), INDEX_BELOW.get(facts.name, lambda f: 3)(facts)
    if len(facts.inputs) == 1 and len(facts.args) == 2 and type(facts.args[1]) is int:
        start = facts.args[1] - 1  # around the number it is compared with
    return [random_tensor(t, generator, start, below) for t in facts.inputs]


def random_tensor(tensor: TensorFacts, generator: torch.Generator, start: int, below: int) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    if tensor.dtype == torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5
    return torch.randint(start, start + below, tensor.shape, generator=generator, dtype=tensor.dtype)


INDEX_BELOW: dict[str, Callable[[OpFacts], int]] = {
    "aten.embedding.default": lambda f: f.inputs[0].shape[0],
    "aten.embedding_dense_backward.default": lambda f: f.args[2],
    "aten.nll_loss_forward.default": lambda f: f.inputs[0].shape[-1],
    "aten.nll_loss_backward.default": lambda f: f.inputs[1].shape[-1],
}
"""Largest index, plus one, that an op takes (ops not named: 3)."""


def _attention_fits(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *mask: tuple[int, ...]) -> bool:
    same = (q[0], q[3]) == (k[0], k[3]) and k == v and q[1] % k[1] == 0
    full = (q[0], q[1], q[2], k[2])
    return same and all(m in (1, n) for shape in mask for m, n in zip(shape, full[4 - len(shape) :], strict=True))


SAFE: dict[str, Callable[..., bool]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_fits,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda g, q, k, v, o, lse, *mask: (
        g == q == o and lse == q[:3] and _attention_fits(q, k, v, *mask)
    ),
    "aten.embedding_dense_backward.default": lambda grad, indices: grad[:-1] == indices,
    "aten.nll_loss_forward.default": lambda x, target, *w: x[:-1] == target and all(s == x[-1:] for s in w),
    "aten.nll_loss_backward.default": lambda grad, x, target, *w: (
        x == (*target, 18) and grad in ((), target) and all(s in ((), x[-1:]) for s in w)
    ),
    "aten.native_layer_norm_backward.default": lambda g, x, mean, rstd, *_: g == x and mean[:-1] == rstd[:-1] == x[:-1],
    "aten.native_group_norm.default": lambda x, *w: all(s == x[1:2] for s in w),
    "aten.avg_pool2d_backward.default": lambda g, x: g[:-2] == x[:-2],
    "aten.max_pool2d_with_indices_backward.default": lambda g, x, indices: g == indices and g[:-2] == x[:-2],
    "aten.native_group_norm_backward.default": lambda g, x, mean, rstd, *w: (
        g == x and mean == rstd and mean[0] == x[0] and x[1] % mean[1] == 0 and all(s == x[1:2] for s in w)
    ),
}
"""Shapes that a kernel takes without reading past its tensors; these kernels do not check for themselves. The examples
of nll_loss have 18 classes."""
