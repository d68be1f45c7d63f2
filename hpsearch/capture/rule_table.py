"""Our own sharding rules, for ops where DTensor has none, wrong ones, or ones that depend on the mesh's size.

Most are written by letters, as in an einsum: `letters(["bh..", "bh.."], ["bh.."])` says that the op works on each
letter independently. Cutting a letter shards every tensor that has it; an input without it is needed whole (R), an
output without it is an addend (P). A dim written `.` is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from hpsearch.capture.op_facts import OpFacts
from hpsearch.graph import Rule

OwnRule = Callable[[OpFacts], Iterable[Rule]]


def letters(inputs: Sequence[str], outputs: Sequence[str]) -> list[Rule]:
    """One rule for each letter, in order of first appearance."""
    seen = [c for c in dict.fromkeys("".join([*inputs, *outputs])) if c != "."]
    return [
        (
            tuple(f"S{word.index(c)}" if c in word else "R" for word in inputs),
            tuple(f"S{word.index(c)}" if c in word else "P" for word in outputs),
        )
        for c in seen
    ]


def linear(num_inputs: int, num_outputs: int, *arguments: int) -> Rule:
    """The op is linear in these arguments jointly, the others fixed: addends in, addends out."""
    return tuple("P" if i in arguments else "R" for i in range(num_inputs)), ("P",) * num_outputs


_NAMES = "abcdefghijklmnopqrstuvwxyz"


def _word(rank: int, *fixed: int) -> str:
    """A letter for each dim, `.` for the dims in `fixed` (negative ones count from the end)."""
    dots = {d % rank for d in fixed} if rank else set()
    return "".join("." if d in dots else _NAMES[d] for d in range(rank))


def _einsum(facts: OpFacts) -> Iterable[Rule]:
    left, _, out = facts.args[0].replace(" ", "").partition("->")
    words = left.split(",")
    yield from letters(words, [out])
    for i in range(len(words)):
        yield linear(len(words), 1, i)


def _view(facts: OpFacts) -> Iterable[Rule]:
    """A cut before the same number of leading elements is the same cut: exact for contiguous pieces, given that both
    dims divide."""
    source, target = facts.inputs[0].shape, facts.outputs[0].shape
    for d, size in enumerate(source):
        for e, other in enumerate(target):
            if size > 1 and other > 1 and prod(source[:d]) == prod(target[:e]):
                yield (f"S{d}",), (f"S{e}",)
    yield ("P",), ("P",)


def _expand(facts: OpFacts) -> Iterable[Rule]:
    """Dims are aligned at the right; one that keeps its size keeps its cut. R → S on a new dim is left to slicing."""
    source, target = facts.inputs[0].shape, facts.outputs[0].shape
    offset = len(target) - len(source)
    for d, size in enumerate(source):
        if size == target[d + offset]:
            yield (f"S{d}",), (f"S{d + offset}",)
    yield ("P",), ("P",)


def _attention(facts: OpFacts) -> Iterable[Rule]:
    """(q, k, v, mask?) of [batch, heads, seq, head_dim] → out, logsumexp [batch, heads, seq].

    Head cuts stay right when q has more heads than k and v (consecutive groups), because both must divide. Query
    positions are independent unless the causal mask counts them.
    """
    seq = "." if facts.arg(4, "is_causal", False) else "s"
    yield from letters([f"bh{seq}.", "bh..", "bh..", *_mask(facts, 3, seq)], [f"bh{seq}.", f"bh{seq}"])


def _attention_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, q, k, v, out, logsumexp, mask?) → gradients of q, k, v."""
    seq = "." if facts.arg(7, "is_causal", False) else "s"
    q = f"bh{seq}."
    words = [q, q, "bh..", "bh..", q, f"bh{seq}", *_mask(facts, 6, seq)]
    yield from letters(words, [q, "bh..", "bh.."])
    yield linear(len(words), 3, 0)


def _mask(facts: OpFacts, position: int, seq: str) -> list[str]:
    """The word of the attention mask, which broadcasts from the right; empty when there is none."""
    if len(facts.inputs) <= position:
        return []
    shape = facts.inputs[position].shape
    word = f"bh{seq}."[-len(shape) :] if shape else ""
    return ["".join("." if size == 1 else c for size, c in zip(shape, word, strict=True))]


def _nll_loss(facts: OpFacts) -> Iterable[Rule]:
    """(log-probabilities [N, C] or [C], target, weight?) → loss, total weight.

    The mean (reduction 1) of a shard is not an addend of the whole mean, so only none (0) and sum (2) can be cut.
    """
    rank, reduction = len(facts.inputs[0].shape), facts.args[3]
    if rank < 2 or reduction == 1:
        return
    words = ["n" + "." * (rank - 1), "n", *(["."] if len(facts.inputs) > 2 else [])]
    yield from letters(words, ["n" if reduction == 0 else "", ""])


def _nll_loss_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, log-probabilities, target, weight?, total weight) → gradient; exact for a mean too: total weight is given."""
    rank, reduction = len(facts.inputs[1].shape), facts.args[4]
    if rank < 2:
        return
    grad = "n" if reduction == 0 else ""
    weight = ["."] if len(facts.inputs) > 4 else []
    yield from letters([grad, "n.", "n", *weight, ""], ["n."])
    yield linear(len(facts.inputs), 1, 0)


def _embedding(facts: OpFacts) -> Iterable[Rule]:
    """(weight [V, H], indices) → rows of the weight. Cutting V would need masks around the op, so it is not offered."""
    indices = _word(len(facts.inputs[1].shape))
    yield from letters([".Z", indices], [indices + "Z"])
    yield linear(2, 1, 0)


def _embedding_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, indices) → gradient of the weight; an addend when the indices are cut, unless scaled by frequency."""
    by_frequency = bool(facts.args[4])
    rank = len(facts.inputs[1].shape)
    indices = "." * rank if by_frequency else _word(rank)
    yield from letters([indices + "Z", indices], [".Z"])
    yield linear(2, 1, 0)


def _replicate(facts: OpFacts) -> Iterable[Rule]:
    return ()


NO_RULE = "DTensor has no rule"
BY_SIZE = "DTensor's rule depends on the mesh's size"
MEAN = "DTensor writes the mean as a weighted partial"

OWN: dict[str, tuple[OwnRule, str]] = {
    "hpsearch.einsum.default": (_einsum, NO_RULE),
    "aten.view.default": (_view, BY_SIZE),
    "aten._unsafe_view.default": (_view, BY_SIZE),
    "aten.reshape.default": (_view, BY_SIZE),
    "aten.expand.default": (_expand, BY_SIZE),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (_attention, NO_RULE),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (_attention_backward, NO_RULE),
    "aten.nll_loss_forward.default": (_nll_loss, MEAN),
    "aten.nll_loss_backward.default": (_nll_loss_backward, MEAN),
    "aten.embedding.default": (_embedding, "DTensor cuts the vocabulary with a masked partial"),
    "aten.embedding_dense_backward.default": (_embedding_backward, "same"),
    "aten.arange.default": (_replicate, NO_RULE),
    "aten.arange.start": (_replicate, NO_RULE),
    "aten.arange.start_step": (_replicate, NO_RULE),
    "aten.full.default": (_replicate, NO_RULE),
    "aten.zeros.default": (_replicate, NO_RULE),
    "aten.ones.default": (_replicate, NO_RULE),
    "aten.empty.memory_format": (_replicate, NO_RULE),
    "aten.scalar_tensor.default": (_replicate, NO_RULE),
}
"""Operator → (its rules, why they are ours)."""
