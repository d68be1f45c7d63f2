"""Our own sharding rules, for ops where DTensor has none, wrong ones, or ones that depend on the mesh's size.

Most are written by letters, as in an einsum: `letters(["bh..", "bh.."], ["bh.."])` says that the op works on each
letter independently. Cutting a letter shards every tensor that has it; an input without it is needed whole (R), an
output without it is an addend (P). A dim written `.` is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from hpsearch.capture.expert_rules import EXPERT_RULES
from hpsearch.capture.op_facts import OpFacts
from hpsearch.graph import Rule

OwnRule = Callable[[OpFacts], Iterable[Rule]]

_NAMES = "abcdefghijklmnopqrstuvwxyz"


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


def _word(rank: int, *fixed: int) -> str:
    """A letter for each dim, `.` for the dims in `fixed` (negative ones count from the end)."""
    dots = {d % rank for d in fixed} if rank else set()
    return "".join("." if d in dots else _NAMES[d] for d in range(rank))


def _broadcast(shape: Sequence[int], word: str) -> str:
    """The word of a tensor that broadcasts to `word` from the right."""
    end = word[len(word) - len(shape) :]
    return "".join("." if size == 1 else c for size, c in zip(shape, end, strict=True))


def _pointwise(facts: OpFacts) -> Iterable[Rule]:
    """Elementwise with broadcasting, nothing said about sums."""
    word = _word(max(len(t.shape) for t in facts.outputs))
    return letters(
        [_broadcast(t.shape, word) for t in facts.inputs], [_broadcast(t.shape, word) for t in facts.outputs]
    )


def _copy(facts: OpFacts) -> Iterable[Rule]:
    """copy(x, source) and fill(x, value) return the second argument in the form of the first."""
    yield from _pointwise(facts)
    yield ("R", "P"), ("P",)


def _loss(facts: OpFacts) -> Iterable[Rule]:
    """(prediction, target) → elementwise loss (reduction 0), its sum (2), or its mean (1), which no cut can give."""
    word, reduction = _word(len(facts.inputs[0].shape)), facts.arg(2, "reduction", 1)
    if reduction != 1:
        yield from letters([_broadcast(t.shape, word) for t in facts.inputs], [word if reduction == 0 else ""])


def _leading(*fixed: int) -> OwnRule:
    """Every tensor keeps its dims; those in `fixed` (from the end) are mixed, the others only carried."""

    def rule(facts: OpFacts) -> Iterable[Rule]:
        words = [_word(len(t.shape), *fixed) for t in (*facts.inputs, *facts.outputs)]
        return letters(words[: len(facts.inputs)], words[len(facts.inputs) :])

    return rule


def _along(position: int) -> OwnRule:
    """Every tensor keeps its dims; the one that the argument at `position` names is mixed."""

    def rule(facts: OpFacts) -> Iterable[Rule]:
        return _leading(facts.args[position])(facts)

    return rule


def _einsum(facts: OpFacts) -> Iterable[Rule]:
    left, _, out = facts.args[0].replace(" ", "").partition("->")
    words = left.split(",")
    yield from letters(words, [out])
    for i in range(len(words)):
        yield linear(len(words), 1, i)


def _view(facts: OpFacts) -> Iterable[Rule]:
    """A cut behind equally many leading elements is the same cut, and no other is, given that both dims divide."""
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


def _unfold(facts: OpFacts) -> Iterable[Rule]:
    """unfold(x, dim, size, step): windows along `dim` go to a new last dim."""
    word = _word(len(facts.inputs[0].shape), facts.args[1])
    return letters([word], [word + "."])


def _attention(facts: OpFacts) -> Iterable[Rule]:
    """(q, k, v, mask?) of [batch, heads, seq, head_dim] → out, logsumexp [batch, heads, seq].

    Head cuts stay right when q has more heads than k and v (consecutive groups), because both must divide. Query
    positions are independent unless the causal mask counts them.
    """
    seq = "." if facts.arg(4, "is_causal", False) else "s"
    yield from letters([f"bh{seq}.", "bh..", "bh..", *_mask(facts, 3, seq)], [f"bh{seq}.", f"bh{seq}"])


def _attention_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, q, k, v, out, logsumexp, mask?) → gradients of q, k, v.

    Given logsumexp, key positions are independent as well: a cut of them leaves addends of the gradient of q.
    """
    seq, keys = ("..", ".") if facts.arg(7, "is_causal", False) else ("s.", "t")
    q, kv = f"bh{seq}", f"bh{keys}."
    words = [q, q, kv, kv, q, q[:3], *_mask(facts, 6, seq[0], keys)]
    yield from letters(words, [q, kv, kv])


def _mask(facts: OpFacts, position: int, seq: str, keys: str = ".") -> list[str]:
    """The word of the attention mask; none when there is no mask."""
    return [_broadcast(t.shape, f"bh{seq}{keys}") for t in facts.inputs[position:]]


def _nll_loss(facts: OpFacts) -> Iterable[Rule]:
    """(log-probabilities [N, C] or [C], target, weight?) → loss, total weight.

    The mean (reduction 1) of a shard is not an addend of the whole mean, so only none (0) and sum (2) can be cut.
    """
    rank, reduction = len(facts.inputs[0].shape), facts.args[3]
    weight = ["R"] * (len(facts.inputs) - 2)
    if rank == 2 and reduction != 1:
        yield ("S0", "S0", *weight), ("S0", "R") if reduction == 0 else ("P", "P")


def _nll_loss_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, log-probabilities, target, weight?, total weight) → gradient; exact for a mean too: the total is given."""
    rank, reduction = len(facts.inputs[1].shape), facts.args[4]
    if rank == 2:
        weight = ["."] * (len(facts.inputs) - 4)
        yield from letters(["n" if reduction == 0 else "", "n.", "n", *weight, ""], ["n."])


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


def _convolution(facts: OpFacts) -> Iterable[Rule]:
    """(x [N, I, …], w, bias?) → [N, O, …]; w is [O, I/groups, …], transposed [I, O/groups, …].

    A cut of I leaves addends, so the bias must be one too. Grouped channels are cut only when each is its own group:
    else groups, which no tensor dim shows, would have to divide.
    """
    x, w = facts.inputs[:2]
    bias = facts.inputs[2:]
    spatial = "." * (len(x.shape) - 2)
    transposed, groups = facts.args[6], facts.args[8]
    yield ("S0", *["R"] * (1 + len(bias))), ("S0",)
    if groups == 1:
        weight = ("io" if transposed else "oi") + spatial
        out = letters([f".o{spatial}", weight], [""])
        yield ("R", out[0][0][1], *["S0"] * len(bias)), ("S1",)
        yield ("S1", f"S{weight.index('i')}", *["P"] * len(bias)), ("P",)
    elif groups == x.shape[1] and (not transposed or w.shape[1] == 1):
        yield ("S1", "S0", *["S0"] * len(bias)), ("S1",)
    yield ("P", "R", *["P"] * len(bias)), ("P",)


def _convolution_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, x, w) → the gradients of x, w, bias that the mask asks for."""
    _, x, w = facts.inputs
    transposed, groups, mask = facts.args[7], facts.args[9], facts.args[10]
    into, out = ("S0", "S1") if transposed else ("S1", "S0")
    found = [(("S0", "S0", "R"), ("S0", "P", "P"))]
    if groups == 1:
        found += [(("S1", "R", out), ("P", out, "S0")), (("R", "S1", into), ("S1", into, "R"))]
    elif groups == x.shape[1] and (not transposed or w.shape[1] == 1):
        found += [(("S1", "S1", "S0"), ("S1", "S0", "S0"))]
    found += [(("P", "R", "R"), ("P", "P", "P"))]
    for inputs, outputs in found:
        yield inputs, tuple(text for text, wanted in zip(outputs, mask, strict=True) if wanted)


def _group_norm(facts: OpFacts) -> Iterable[Rule]:
    """(x [N, C, …], weight?, bias?) → result, mean [N, G], 1/std; the cut of G shows in mean."""
    affine = len(facts.inputs) - 1
    yield ("S0", *["R"] * affine), ("S0", "S0", "S0")
    yield ("S1", *["S0"] * affine), ("S1", "S1", "S1")


def _group_norm_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, x, mean, 1/std, weight?) → the gradients of x, weight, bias that the mask asks for."""
    affine = len(facts.inputs) - 4
    for cut, weight, grads in (("S0", "R", ("S0", "P", "P")), ("S1", "S0", ("S1", "S0", "S0"))):
        outputs = tuple(g for g, wanted in zip(grads, facts.args[9], strict=True) if wanted)
        yield (cut,) * 4 + (weight,) * affine, outputs


def _layer_norm_backward(facts: OpFacts) -> Iterable[Rule]:
    """(grad, x, mean, 1/std, weight?, bias?) → gradients of x, weight, bias; leading dims are independent."""
    rank, normal = len(facts.inputs[0].shape), len(facts.args[2])
    rows = _word(rank - normal) + "." * normal
    mask = facts.args[7]
    grads = [g for g, wanted in zip((rows, "." * normal, "." * normal), mask, strict=True) if wanted]
    return letters([rows] * 4 + ["." * normal] * (len(facts.inputs) - 4), grads)


def _same_everywhere(facts: OpFacts) -> Iterable[Rule]:
    """The values of the input are not used (new_zeros and its like), so it may lie in any way."""
    for d in range(len(facts.inputs[0].shape)):
        yield (f"S{d}",), ("R",)
    yield ("P",), ("R",)


def _replicate(facts: OpFacts) -> Iterable[Rule]:
    return ()


def _delta_rule(facts: OpFacts) -> Iterable[Rule]:
    """Rows and heads are independent; key heads stand for groups of value heads side by side."""
    words = ["b.h." if len(t.shape) == 4 else "b.h" for t in (*facts.inputs, *facts.outputs)]
    yield from letters(words[: len(facts.inputs)], words[len(facts.inputs) :])


NONE = "DTensor has no rule"
SIZE = "DTensor's rule depends on the mesh's size"
MEAN = "DTensor writes the mean as a weighted partial"
BATCH = "DTensor cuts the batch only"
ODD = "DTensor uses a masked partial"

OWN: dict[str, tuple[OwnRule, str]] = {
    "hpsearch.einsum.default": (_einsum, NONE),
    "hpsearch.gated_delta_rule.default": (_delta_rule, NONE),
    "hpsearch.gated_delta_rule_backward.default": (_delta_rule, NONE),
    **{name: (rules, NONE) for name, rules in EXPERT_RULES.items()},
    **{f"aten.{op}": (_view, SIZE) for op in (
        "view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "unsqueeze.default")},
    "aten.expand.default": (_expand, SIZE),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (_attention, NONE),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (_attention_backward, NONE),
    "aten.nll_loss_forward.default": (_nll_loss, MEAN),
    "aten.nll_loss_backward.default": (_nll_loss_backward, MEAN),
    "aten.mse_loss.default": (_loss, NONE),
    "aten.smooth_l1_loss.default": (_loss, NONE),
    "aten.huber_loss.default": (_loss, NONE),
    "aten.embedding.default": (_embedding, ODD),
    "aten.embedding_dense_backward.default": (_embedding_backward, ODD),
    "aten.convolution.default": (_convolution, BATCH),
    "aten.convolution_backward.default": (_convolution_backward, BATCH),
    "aten.native_group_norm.default": (_group_norm, BATCH),
    "aten.native_group_norm_backward.default": (_group_norm_backward, NONE),
    "aten.native_layer_norm_backward.default": (_layer_norm_backward, "DTensor reads a mask that it may not be given"),
    "aten.avg_pool2d_backward.default": (_leading(-1, -2), NONE),
    "aten.avg_pool3d_backward.default": (_leading(-1, -2, -3), NONE),
    "aten.reflection_pad1d.default": (_leading(-1), NONE),
    "aten.reflection_pad2d.default": (_leading(-1, -2), NONE),
    "aten.replication_pad2d.default": (_leading(-1, -2), NONE),
    "aten.pixel_shuffle.default": (_leading(), NONE),
    "aten.pixel_unshuffle.default": (_leading(), NONE),
    "aten.upsample_nearest2d.vec": (_leading(-1, -2), NONE),
    "aten.upsample_bilinear2d.vec": (_leading(-1, -2), NONE),
    "aten.glu.default": (_along(1), NONE),
    "aten.glu_backward.default": (_along(2), NONE),
    "aten.unsafe_split.Tensor": (_along(2), NONE),
    "aten.repeat_interleave.self_int": (_leading(), NONE),
    "aten.unfold.default": (_unfold, NONE),
    "aten.copy.default": (_copy, NONE),
    "aten.fill.Tensor": (_copy, NONE),
    **{f"aten.{op}": (_pointwise, NONE) for op in (
        "fill.Scalar", "lift_fresh_copy.default", "masked_fill.Tensor", "softplus_backward.default",
        "leaky_relu_backward.default", "hardtanh_backward.default", "hardswish_backward.default",
        "floor_divide.default", "__and__.Tensor", "polar.default", "complex.default", "bernoulli.p")},
    **{f"aten.{op}": (_same_everywhere, "values of the input are not used") for op in (
        "new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default",
        "new_empty_strided.default")},
    **{f"aten.{op}": (_replicate, "made alike on every rank") for op in (
        "arange.default", "arange.start", "arange.start_step", "full.default", "zeros.default", "ones.default",
        "empty.memory_format", "empty_strided.default", "scalar_tensor.default", "linspace.default", "eye.default",
        "eye.m", "tril_indices.default", "triu_indices.default", "hann_window.default")},
}  # fmt: skip
"""Operator → (its rules, why they are ours)."""

MORE: dict[str, tuple[Rule, ...]] = {
    "aten.clone.default": ((("P",), ("P",)),),
    "aten.mean.dim": ((("P",), ("P",)),),
    "aten.mean.default": ((("P",), ("P",)),),
    "aten.slice_scatter.default": ((("P", "P"), ("P",)),),
}
"""True rules that DTensor does not offer, beside those that it does."""
