"""The gated delta rule (linear attention of Qwen3-Next, Qwen3.5 and their kin) as one operator.

    hpsearch::gated_delta_rule(query, key, value, g, beta, chunk_size, l2norm) -> Tensor
    hpsearch::gated_delta_rule_backward(grad, query, key, value, g, beta, chunk_size, l2norm) -> 5 gradients

transformers' own torch version loops in Python over chunks and over the positions of a chunk: thousands of ops a layer,
more with every token. On an accelerator it is one kernel, so one op is what should be split and priced. It runs by that
torch version; backward runs it again under autograd. Shapes: query, key [B, S, Hk, D]; value, result [B, S, Hv, Dv];
g, beta [B, S, Hv].
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.capture.ops import LIBRARY, TAGS

NAME = "torch_chunk_gated_delta_rule"
"""transformers' function; every model file has its copy."""
HOME = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
"""The copy that runs; other copies are replaced only where their source is the same."""

_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, int chunk_size, bool l2norm"
LIBRARY.define(f"gated_delta_rule({_ARGUMENTS}) -> Tensor", tags=TAGS)
LIBRARY.define(
    f"gated_delta_rule_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=TAGS
)


def _torch_version() -> Callable[..., Any]:
    found: Callable[..., Any] = inspect.unwrap(getattr(importlib.import_module(HOME), NAME))
    return found


def _forward(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int, l2norm: bool
) -> Tensor:
    run = _torch_version()
    result: Tensor = run(query, key, value, g, beta, chunk_size, use_qk_l2norm_in_kernel=l2norm)[0]
    return result.contiguous()


def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors = [t.detach().requires_grad_() for t in args[:5]]
    with torch.enable_grad():
        result = _forward(*tensors, *args[5:])
    return tuple(t.contiguous() for t in torch.autograd.grad(result, tensors, grad))


LIBRARY.impl("gated_delta_rule", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("gated_delta_rule_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("hpsearch::gated_delta_rule", lib=LIBRARY)
def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int, l2norm: bool
) -> Tensor:
    return query.new_empty(value.shape)


@torch.library.register_fake("hpsearch::gated_delta_rule_backward", lib=LIBRARY)
def _backward_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in args[:5])


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*args[:5])
        ctx.rest = args[5:]
        result: Tensor = torch.ops.hpsearch.gated_delta_rule(*args)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        found = torch.ops.hpsearch.gated_delta_rule_backward(grad, *ctx.saved_tensors, *ctx.rest)
        return *found, None, None


def _as_one_op(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, with training calls as one op; calls that carry a recurrent state stay as they are."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if initial_state is not None or output_final_state:
            rest = (chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel)
            return original(query, key, value, g, beta, *rest, **kwargs)
        return _DeltaRule.apply(query, key, value, g, beta, chunk_size, use_qk_l2norm_in_kernel), None

    return call


@contextmanager
def delta_rule_as_one_op(model: nn.Module) -> Iterator[None]:
    """While open, the gated delta rule of `model`'s modeling files is one op."""
    files = {type(m).__module__ for m in model.modules()}
    homes = [sys.modules[name] for name in sorted(files) if hasattr(sys.modules.get(name), NAME)]
    originals = [(home, getattr(home, NAME)) for home in homes]
    wanted = inspect.getsource(_torch_version()) if originals else ""
    try:
        for home, original in originals:
            if inspect.getsource(inspect.unwrap(original)) == wanted:
                setattr(home, NAME, _as_one_op(original))
        yield
    finally:
        for home, original in originals:
            setattr(home, NAME, original)


def delta_rule_flops(key: Tensor, value: Tensor, chunk_size: int) -> int:
    """Multiplications and additions of the forward: five products inside chunks, three with the recurrent state."""
    batch, length, heads, width = value.shape
    inside = chunk_size * (3 * key.shape[-1] + 2 * width)
    return 2 * batch * length * heads * (inside + 3 * key.shape[-1] * width)
