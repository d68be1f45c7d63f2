"""What an operator costs: its kind of price formula, and its multiply and add count."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from hpsearch.capture.delta_rule import delta_rule_flops
from hpsearch.capture.ops import contraction

aten = torch.ops.aten

_ATTENTION = "_scaled_dot_product_"
_MATMUL = {"mm", "bmm", "einsum", "_grouped_mm", "addmm", "baddbmm", "dot", "mv", "grouped_mm", "grouped_mm_weight"}
_CONV = {"convolution", "convolution_backward"}
_EMBEDDING = {"embedding", "embedding_dense_backward", "index_select", "gather", "scatter", "index", "index_put",
              "scatter_add", "_unsafe_index", "_unsafe_index_put", "dispatch", "dispatch_backward", "combine",
              "combine_backward"}  # fmt: skip
_REDUCTION = {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "prod", "any",
              "all", "cumsum", "_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "logsumexp",
              "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
              "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward", "linalg_vector_norm",
              "topk", "sort", "histc", "bincount", "route", "grouped_sum"}  # fmt: skip
_VIEW = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split",
         "split_with_sizes", "unbind", "chunk", "as_strided", "diagonal", "view_as_complex", "view_as_real",
         "unfold", "_reshape_alias", "real", "imag", "alias", "detach"}  # fmt: skip

_POINTWISE = {"_to_copy", "clone", "copy", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "cat",
              "constant_pad_nd", "slice_backward", "select_backward", "native_dropout", "native_dropout_backward",
              "tril", "triu", "masked_fill", "roll", "flip", "slice_scatter", "select_scatter", "stack", "repeat",
              "rand_like", "bernoulli", "grouped_add"}  # fmt: skip


def kind_of(node: fx.Node) -> str:
    """One of matmul, attention, conv, embedding, pointwise, reduction, view, factory, other."""
    name = _name(node.target)
    if name.startswith((_ATTENTION, "gated_delta_rule")):
        return "attention"
    for kind, names in (("matmul", _MATMUL), ("conv", _CONV), ("embedding", _EMBEDDING), ("reduction", _REDUCTION)):
        if name in names:
            return kind
    if name in _VIEW:
        return "view"
    if not node.all_input_nodes:
        return "factory"
    if torch.Tag.pointwise in node.target.tags or name in _POINTWISE:  # type: ignore[union-attr]
        return "pointwise"
    return "other"


def is_view(node: fx.Node) -> bool:
    return kind_of(node) == "view"


def _name(target: Any) -> str:
    return str(target._schema.name).split("::")[1]


def flops_of(node: fx.Node) -> int:
    """Multiplications and additions of the whole op; 0 where neither torch nor we count any (elementwise work)."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    name = _name(node.target)
    if name == "einsum":
        return _einsum(*args)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _attention(args[0], args[1], args[2], products=(1, 1))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention(args[1], args[2], args[3], products=(3, 2))
    if name == "gated_delta_rule":
        return delta_rule_flops(args[1], args[2], args[5])
    if name == "gated_delta_rule_backward":  # forward again, and two products for each of its own
        return 3 * delta_rule_flops(args[2], args[3], args[6])
    if name == "grouped_mm":
        return 2 * node.meta["val"].numel() * int(args[0].shape[-1])
    if name == "grouped_mm_weight":
        return _grouped_outer(args)
    if name == "_grouped_mm":
        return 2 * node.meta["val"].numel() * args[0].shape[-1] if args[1].dim() == 3 else _grouped_outer(args)
    formula = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> int:
    form = contraction(equation)
    free = b.shape[-form.b_free :] if form.b_contracted_first else b.shape[: form.b_free]
    return 2 * a.numel() * prod(free)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, products: tuple[int, int]) -> int:
    """`products`: matrix products over the query/key width and over the value width; causal counts as full.

    Forward: q·k and p·v. Backward: q·k again, dq and dk over the query width; dv and dp over the value width.
    """
    batch, heads, queries, width = q.shape
    pairs = batch * heads * queries * k.shape[-2]
    return 2 * pairs * (products[0] * width + products[1] * v.shape[-1])


def _grouped_outer(args: tuple[Any, ...]) -> int:
    """A grouped product of two matrices sums over the grouped dim: every row meets every column once."""
    return 2 * int(args[0].shape[0]) * int(args[0].shape[1]) * int(args[1].shape[1])
