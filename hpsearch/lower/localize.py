"""The local op: what one rank runs when its operands are pieces.

Most ops run unchanged on pieces. Those that are told sizes are told the sizes of the piece instead. Ops that only
rename dims become a reshape: it accepts pieces whose strides differ from the whole tensor's, and it cannot mistake a
dim that was cut down to size 1 for one that was always 1 (squeeze would).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Localizer = Callable[[Args, Kwargs, Sequence[Shape], Sequence[Shape]], tuple[Args, Kwargs]]

_aten = torch.ops.aten


def localize(
    target: Any,
    args: Args,
    kwargs: Kwargs,
    local_output_shapes: Sequence[Shape],
    local_input_shapes: Sequence[Shape],
) -> tuple[Any, Args, Kwargs]:
    """(target, args, kwargs) of the op that a rank runs instead of `target(*args, **kwargs)`.

    args and kwargs are those of the global op (fx nodes or tensors where tensors stand; these are passed through).
    The shapes are those of the pieces: outputs in the order of the tensors that exist in the flattened result, inputs
    in argument order with lists flattened and None left out.
    """
    if target in _RESHAPES:
        return _aten.reshape.default, (args[0], list(local_output_shapes[0])), {}
    if target not in _SIZED:
        return target, tuple(args), dict(kwargs)
    new_args, new_kwargs = _SIZED[target](tuple(args), dict(kwargs), local_output_shapes, local_input_shapes)
    return target, new_args, new_kwargs


def is_sized(target: Any) -> bool:
    """Whether the local op depends on the size of the piece at all."""
    return target in _RESHAPES or target in _SIZED


def localize_args(
    target: Any,
    args: Args,
    kwargs: Kwargs,
    local_output_shapes: Sequence[Shape],
    local_input_shapes: Sequence[Shape],
) -> tuple[Args, Kwargs]:
    """`localize` without the target; the args are for `localize(...)[0]`."""
    return localize(target, args, kwargs, local_output_shapes, local_input_shapes)[1:]


def _replaced(args: Args, position: int, value: Any) -> Args:
    return (*args[:position], value, *args[position + 1 :])


def _output_size(position: int) -> Localizer:
    """The argument at `position` is the output's shape."""

    def change(args: Args, kwargs: Kwargs, outs: Sequence[Shape], ins: Sequence[Shape]) -> tuple[Args, Kwargs]:
        return _replaced(args, position, list(outs[0])), kwargs

    return change


def _strided(args: Args, kwargs: Kwargs, outs: Sequence[Shape], ins: Sequence[Shape]) -> tuple[Args, Kwargs]:
    """new_empty_strided(x, size, stride): contiguous strides of the local size."""
    strides, step = [], 1
    for size in reversed(outs[0]):
        strides.append(step)
        step *= max(size, 1)
    return (args[0], list(outs[0]), strides[::-1], *args[3:]), kwargs


def _convolution(args: Args, kwargs: Kwargs, outs: Sequence[Shape], ins: Sequence[Shape]) -> tuple[Args, Kwargs]:
    """convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups): groups of the piece."""
    return _replaced(args, 8, _groups(outs[0] if args[6] else ins[0], ins[1])), kwargs


def _convolution_backward(
    args: Args, kwargs: Kwargs, outs: Sequence[Shape], ins: Sequence[Shape]
) -> tuple[Args, Kwargs]:
    """convolution_backward(grad, x, w, bias_sizes, …, transposed (7), output_padding, groups (9), mask)."""
    groups = _groups(ins[0] if args[7] else ins[1], ins[2])
    bias = args[3] if args[3] is None else [ins[0][1]]
    return _replaced(_replaced(args, 3, bias), 9, groups), kwargs


def _groups(image: Shape, weight: Shape) -> int:
    """Groups follow from shapes: weight dim 1 is channels per group, of the input or, if transposed, of the output."""
    return image[1] // weight[1]


def _group_norm(first: int) -> Localizer:
    """N, C, HxW, groups stand from position `first`; the mean output or input tells the local group count."""

    def change(args: Args, kwargs: Kwargs, outs: Sequence[Shape], ins: Sequence[Shape]) -> tuple[Args, Kwargs]:
        image, mean = (ins[0], outs[1]) if first == 3 else (ins[1], ins[2])
        return (*args[:first], image[0], image[1], args[first + 2], mean[1], *args[first + 4 :]), kwargs

    return change


_RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten._reshape_alias.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
    }
)

_SIZED: dict[Any, Localizer] = {
    _aten.expand.default: _output_size(1),
    _aten.slice_backward.default: _output_size(1),
    _aten.select_backward.default: _output_size(1),
    _aten.new_zeros.default: _output_size(1),
    _aten.new_ones.default: _output_size(1),
    _aten.new_empty.default: _output_size(1),
    _aten.new_full.default: _output_size(1),
    _aten.new_empty_strided.default: _strided,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_group_norm.default: _group_norm(3),
    _aten.native_group_norm_backward.default: _group_norm(5),
}
"""Operators whose arguments depend on the size of the piece."""
