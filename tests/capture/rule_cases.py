"""Ops whose rules are held to the truth: those of captured models, and those made by hand. Every dim divides by 2 and 3
where it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpsearch.capture import capture
from hpsearch.capture.op_facts import OpFacts, TensorFacts, output_slots
from tests.capture.models import Case

aten = torch.ops.aten
ROWS, LENGTH, VOCAB = 6, 6, 18
_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 12, "num_hidden_layers": 2}
_GQA: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 30, "pad_token_id": 0}


def _tokens(**more: Any) -> dict[str, Any]:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **more}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    return Case(LlamaForCausalLM(LlamaConfig(hidden_size=48, **_SMALL, **_GQA)), _tokens())


def qwen2() -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(hidden_size=48, tie_word_embeddings=True, **_SMALL, **_GQA)
    return Case(Qwen2ForCausalLM(config), _tokens())


def gemma3() -> Case:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(hidden_size=36, head_dim=6, sliding_window=3, layer_types=kinds, **_SMALL, **_GQA)
    return Case(Gemma3ForCausalLM(config), _tokens())


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=36, n_head=6, vocab_size=VOCAB, n_positions=12, attn_pdrop=0.0,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return Case(GPT2LMHeadModel(config), _tokens())


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=36, intermediate_size=30, num_hidden_layers=2, num_attention_heads=6, image_size=8,
                       patch_size=4, num_labels=6, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0)  # fmt: skip
    batch = {"pixel_values": torch.zeros(ROWS, 3, 8, 8), "labels": torch.zeros(ROWS, dtype=torch.long)}
    return Case(ViTForImageClassification(config), batch)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=36, d_kv=6, d_ff=30, num_layers=2, num_heads=6, vocab_size=VOCAB, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=6)  # fmt: skip
    return Case(T5ForConditionalGeneration(config), _tokens())


def convnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3, padding=1, bias=False),
        nn.GroupNorm(6, 12), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(12, 12, 3, groups=12, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 6))  # fmt: skip
    batch = torch.zeros(ROWS, 3, 12, 12), torch.zeros(ROWS, dtype=torch.long)
    return Case(model, batch, lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]))


FAMILIES = {f.__name__: f for f in (llama, qwen2, gemma3, gpt2, vit, t5, convnet)}


def captured_ops(family: str) -> dict[Any, OpFacts]:
    """The distinct ops of a family's captured graphs, by key, blocks left out."""
    case = FAMILIES[family]()
    captured = capture(case.model, case.batch, loss=case.loss)
    found: dict[Any, OpFacts] = {}
    for graph in captured.fx.values():
        for node in graph.nodes:
            if node.op == "call_function" and hasattr(node.target, "_schema") and "block" not in str(node.target):
                facts = OpFacts.of(node)
                found.setdefault(facts.key, facts)
    return found


def f(*shape: int) -> TensorFacts:
    return TensorFacts(shape, torch.float64)


def i(*shape: int) -> TensorFacts:
    return TensorFacts(shape, torch.int64)


def b(*shape: int) -> TensorFacts:
    return TensorFacts(shape, torch.bool)


def op(target: Any, *args: Any, **kwargs: Any) -> OpFacts:
    """The facts of one call; the result's shape comes from a run on the meta device."""
    bare = OpFacts(target, args, kwargs, (), ())
    metas: list[TensorFacts] = []

    def meta(tensor: TensorFacts) -> torch.Tensor:
        metas.append(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    meta_args, meta_kwargs = bare.mapped(meta)
    return OpFacts(target, args, kwargs, tuple(metas), output_slots(target(*meta_args, **meta_kwargs)))


_QKV = f(6, 12, 6, 4), f(6, 6, 6, 4), f(6, 6, 6, 4)
_SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
_SDPA_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NORM = f(6, 12, 4), f(6, 12, 4), f(6, 6), f(6, 6)
_IMAGE, _SMALLER = f(6, 6, 12, 12), f(6, 6, 6, 6)


def _conv(x: TensorFacts, w: TensorFacts, bias: Any, transposed: bool, groups: int) -> OpFacts:
    return op(aten.convolution.default, x, w, bias, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)


def _conv_backward(
    grad: TensorFacts, x: TensorFacts, w: TensorFacts, transposed: bool, groups: int, mask: list[bool]
) -> OpFacts:
    sizes = [grad.shape[1]] if mask[2] else None
    return op(
        aten.convolution_backward.default, grad, x, w, sizes, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, mask
    )


def hand_made() -> Iterator[OpFacts]:
    """Ops of our own table that the models above do not use, or not in every form."""
    einsum = torch.ops.hpsearch.einsum.default
    yield op(einsum, "bsd,fd->bsf", f(6, 12, 18), f(24, 18))
    yield op(einsum, "bsd,bsf->df", f(6, 12, 18), f(6, 12, 24))
    yield op(einsum, "bskl,fkl->bsf", f(6, 12, 6, 18), f(24, 6, 18))
    delta = torch.ops.hpsearch.gated_delta_rule.default
    delta_back = torch.ops.hpsearch.gated_delta_rule_backward.default
    for rows, heads in ((6, 1), (1, 6)):  # one cut at a time: six operands make too many combinations
        wide, flat = f(rows, 5, heads, 5), f(rows, 5, heads)
        yield op(delta, wide, wide, wide, flat, flat, 5, False)
        yield op(delta_back, wide, wide, wide, wide, flat, flat, 5, False)
    yield op(_SDPA, *_QKV, 0.0, False)
    yield op(_SDPA, *_QKV, 0.0, False, attn_mask=f(6, 1, 6, 6))
    yield op(_SDPA, *_QKV, 0.0, False, attn_mask=f(6, 6))
    saved = _QKV[0], f(6, 12, 6)
    yield op(_SDPA_BACK, _QKV[0], *_QKV, *saved, 0.0, False)
    yield op(_SDPA_BACK, _QKV[0], *_QKV, *saved, 0.0, False, attn_mask=f(6, 1, 6, 6))
    for reduction in (0, 1, 2):
        yield op(aten.nll_loss_forward.default, f(12, 18), i(12), None, reduction, -100)
        grad = f(12) if reduction == 0 else f()
        yield op(aten.nll_loss_backward.default, grad, f(12, 18), i(12), None, reduction, -100, f())
        yield op(aten.mse_loss.default, f(6, 12), f(6, 12), reduction)
        yield op(aten.smooth_l1_loss.default, f(6, 12), f(6, 12), reduction)
        yield op(aten.huber_loss.default, f(6, 12), f(6, 12), reduction)
    yield op(aten.nll_loss_forward.default, f(12, 18), i(12), f(18), 2, -100)
    yield op(aten.nll_loss_backward.default, f(), f(12, 18), i(12), f(18), 2, -100, f())
    yield op(aten.embedding_dense_backward.default, f(6, 12, 18), i(6, 12), 24, -1, True)
    yield from _convolutions()
    yield op(aten.native_group_norm.default, f(6, 12, 4), f(12), f(12), 6, 12, 4, 6, 1e-5)
    yield op(aten.native_group_norm_backward.default, *_NORM, f(12), 6, 12, 4, 6, [True, True, True])
    yield op(aten.native_group_norm_backward.default, *_NORM, None, 6, 12, 4, 6, [True, False, False])
    rows = f(6, 12, 1)
    for mask in ([True, True, True], [True, True, False], [False, True, True]):
        args = f(6, 12, 18), f(6, 12, 18), [18], rows, rows, f(18), f(18), mask
        yield op(aten.native_layer_norm_backward.default, *args)
    yield op(aten.avg_pool2d_backward.default, _SMALLER, _IMAGE, [2, 2], [2, 2], [0, 0], False, True, None)
    yield op(aten.avg_pool3d_backward.default, f(6, 6, 2, 2, 2), f(6, 6, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, False,
             True, None)  # fmt: skip
    yield op(aten.reflection_pad1d.default, f(6, 6, 12), [1, 1])
    yield op(aten.reflection_pad2d.default, _SMALLER, [1, 1, 1, 1])
    yield op(aten.replication_pad2d.default, _SMALLER, [1, 1, 1, 1])
    yield op(aten.pixel_shuffle.default, f(6, 24, 6, 6), 2)
    yield op(aten.pixel_unshuffle.default, _SMALLER, 2)
    yield op(aten.upsample_nearest2d.vec, _SMALLER, None, [2.0, 2.0])
    yield op(aten.upsample_bilinear2d.vec, _SMALLER, None, True, [2.0, 2.0])
    yield from _shapes()


def _convolutions() -> Iterator[OpFacts]:
    mask = [True, True, True]
    for transposed in (False, True):
        yield _conv(_SMALLER, f(6, 12, 3, 3) if transposed else f(12, 6, 3, 3), f(12), transposed, 1)
        yield _conv(_SMALLER, f(6, 1, 3, 3), f(6), transposed, 6)
        yield _conv(_SMALLER, f(6, 2, 3, 3), f(6), transposed, 3)
        weight = f(6, 12, 3, 3) if transposed else f(12, 6, 3, 3)
        yield _conv_backward(f(6, 12, 6, 6), _SMALLER, weight, transposed, 1, mask)
        yield _conv_backward(_SMALLER, _SMALLER, f(6, 1, 3, 3), transposed, 6, mask)
        yield _conv_backward(_SMALLER, _SMALLER, f(6, 2, 3, 3), transposed, 3, [True, False, True])


def _shapes() -> Iterator[OpFacts]:
    x = f(6, 12, 18)
    yield op(aten.view.default, f(6, 4), [4, 6])
    yield op(aten.view.default, f(2, 6, 12), [12, 3, 4])
    yield op(aten._unsafe_view.default, f(6, 1, 12), [6, 12])
    yield op(aten.reshape.default, f(72, 18), [6, 12, 18])
    yield op(aten._reshape_alias.default, f(6, 12), [72], [1])
    yield op(aten.squeeze.default, f(6, 1, 12))
    yield op(aten.squeeze.dim, f(6, 1, 3), 2)
    yield op(aten.squeeze.dims, f(6, 1, 12, 1), [1, 2])
    yield op(aten.expand.default, f(6, 1, 12), [6, 18, 12])
    yield op(aten.glu.default, x, 1)
    yield op(aten.glu_backward.default, f(6, 6, 18), x, 1)
    yield op(aten.unsafe_split.Tensor, x, 6, 1)
    yield op(aten.repeat_interleave.self_int, x, 2, 1)
    yield op(aten.unfold.default, x, 1, 4, 2)
    yield op(aten.copy.default, x, x)
    yield op(aten.copy.default, x, f(12, 1))
    yield op(aten.fill.Tensor, f(6, 12), f())
    yield op(aten.fill.Scalar, f(6, 12), 3.0)
    yield op(aten.lift_fresh_copy.default, f(6, 12))
    yield op(aten.masked_fill.Tensor, f(6, 12), b(6, 1), f())
    yield op(aten.softplus_backward.default, x, x, 1.0, 20.0)
    yield op(aten.leaky_relu_backward.default, x, x, 0.1, False)
    yield op(aten.hardtanh_backward.default, x, x, 0.0, 0.9)
    yield op(aten.hardswish_backward.default, x, x)
    yield op(aten.floor_divide.default, f(6, 12), f(12))
    yield op(aten.__and__.Tensor, b(6, 12), b(12))
    yield op(aten.polar.default, f(6, 12), f(6, 12))
    yield op(aten.complex.default, f(6, 12), f(6, 12))
    yield op(aten.bernoulli.p, f(6, 12), 0.3)
    yield op(aten.new_zeros.default, f(6, 12), [12, 18])
    yield op(aten.new_ones.default, f(6, 12), [12])
    yield op(aten.new_full.default, f(6, 12), [12], 2.0)
    yield op(aten.clone.default, x)
    yield op(aten.mean.dim, x, [2], True)
    yield op(aten.mean.default, x)
    yield op(aten.slice_scatter.default, x, f(6, 12, 6), 2, 3, 9)
