"""Shapes read off captured graphs against the configs that the models were built from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from hpsearch.capture import capture, capture_config
from hpsearch.errors import CaptureError
from hpsearch.estimate import ModelShape, shape_of_graph
from hpsearch.estimate.anatomy import dissect
from hpsearch.estimate.shape import LatentAttention, StateSpace
from hpsearch.estimate.units import Linear
from hpsearch.graph import ModelGraph

SEQ_LEN = 128
DENSE = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 160,
    "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 8, "n_layer": 4,
    "vocab_size": 512, "n_positions": 256, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
DEEPSEEK = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8, "head_dim": 4,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
GPT_OSS = DENSE | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 64, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
QWEN3_MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # fmt: skip
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 512,
    "hybrid_override_pattern": "M-M*-M-*", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 160, "ssm_state_size": 16, "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 2,
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 160,
    "num_heads": 8, "num_layers": 3, "vocab_size": 512,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip


@cache
def graph_of(name: str) -> ModelGraph:
    return capture_config(CONFIGS[name], rows=2, seq_len=SEQ_LEN, recipe="bf16").graph


def sized(name: str, block: str = "attention") -> ModelShape:
    return shape_of_graph(graph_of(name)).of(block)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "one_kv_head": LLAMA | {"num_key_value_heads": 1}, "gpt2": GPT2, "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS, "qwen3_moe": QWEN3_MOE, "nemotron_h": NEMOTRON_H, "t5": T5,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_counted_once(name: str) -> None:
    graph = graph_of(name)
    assert shape_of_graph(graph).total_params == graph.num_params


def test_llama() -> None:
    shape = shape_of_graph(graph_of("llama"))
    assert shape.pattern == (("attention", "mlp"),) * 4
    assert (shape.hidden, shape.vocab, shape.tied, shape.positions) == (64, 512, False, 0)
    attention, mlp = shape.of("attention"), shape.of("mlp")
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (8, 2, 8)
    assert (attention.causal, attention.window, attention.mla) == (True, 0, None)
    assert (mlp.ffn, mlp.gated) == (160, True)


def test_keys_of_one_head_are_whole_beside_cut_queries() -> None:
    (block,) = graph_of("one_kv_head").blocks.values()
    linears = [(u.n, u.cut) for u in dissect(block).units if isinstance(u, Linear)]
    assert linears[:4] == [(64, "column"), (8, "whole"), (8, "whole"), (64, "row")]
    assert sized("one_kv_head").kv_heads == 1


def test_gpt2_has_learned_positions_a_tied_head_and_no_gate() -> None:
    shape = shape_of_graph(graph_of("gpt2"))
    assert (shape.positions, shape.tied) == (256, True)
    assert (sized("gpt2", "mlp").ffn, sized("gpt2", "mlp").gated) == (256, False)
    assert sized("gpt2").kv_heads == 8


def test_latent_attention_and_shared_experts() -> None:
    shape = shape_of_graph(graph_of("deepseek"))
    assert sized("deepseek").mla == LatentAttention(24, 16, 8, 4, 8)
    assert [layer[1] for layer in shape.pattern] == ["mlp", "moe", "moe", "moe"]
    moe = shape.of("moe")
    assert (moe.experts, moe.top_k, moe.moe_ffn, moe.shared_ffn, moe.moe_gated) == (8, 2, 48, 48, True)
    assert shape.active_params == shape.total_params - 3 * 6 * 3 * 64 * 48


def test_routing_limited_to_groups() -> None:
    """Read off the router's own top-k over groups; a router without one draws from all."""
    for name, wanted in {"deepseek": (4, 2), "qwen3_moe": (1, 1)}.items():
        experts = sized(name, "moe")
        assert (experts.expert_groups, experts.most_groups) == wanted


def test_windows_in_half_of_the_layers_and_experts_with_biases() -> None:
    assert (sized("gpt_oss").window, sized("gpt_oss").window_layers, sized("gpt_oss").kv_heads) == (32, 2, 2)
    assert sized("gpt_oss", "moe").expert_bias


def test_experts_without_a_shared_one() -> None:
    moe = sized("qwen3_moe", "moe")
    assert (moe.experts, moe.top_k, moe.moe_ffn, moe.shared_ffn, moe.expert_bias) == (8, 2, 48, 0, False)


def test_a_hybrid() -> None:
    shape = shape_of_graph(graph_of("nemotron_h"))
    assert [layer[0] for layer in shape.pattern] == [
        "mamba",
        "mlp",
        "mamba",
        "attention",
        "mlp",
        "mamba",
        "mlp",
        "attention",
    ]
    assert shape.of("mamba").mamba == StateSpace(16, 8, 16, 2)
    assert not shape.of("mlp").gated


def test_an_encoder_looks_both_ways_and_a_decoder_has_two_attentions() -> None:
    shape = shape_of_graph(graph_of("t5"))
    kinds = [block for layer in shape.pattern for block in layer if block.startswith("attention")]
    assert len(kinds) == 3 + 2 * 3
    assert {shape.of(kind).causal for kind in kinds[:3]} == {False}
    assert shape.of(kinds[-2]).causal


@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_parallelism_is_found_as_megatron_has_it(name: str) -> None:
    """Every attention and feed-forward ends in a row-parallel linear, and what chooses experts is whole."""
    for piece in graph_of(name).blocks.values():
        linears = [u for u in dissect(piece).units if isinstance(u, Linear)]
        wide = [u for u in linears if not u.routes and min(u.n, u.k) > 24]
        assert {u.cut for u in wide} <= {"column", "row"}
        assert all(u.cut == "whole" for u in linears if u.routes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            x = convolution(x).relu()
        return x.square().mean()


def test_what_it_cannot_price_is_refused() -> None:
    graph = capture(Net(), (torch.randn(2, 4, 16),), recipe="fp32").graph
    with pytest.raises(CaptureError, match="expected linear layers to estimate, but found none"):
        shape_of_graph(graph)


def test_a_layer_that_stands_alone_is_read_as_well() -> None:
    """One dense layer before the experts is no repeated block."""
    shape = shape_of_graph(graph_of("deepseek"))
    assert shape.layers == 4
    assert shape.pattern[0] == ("attention", "mlp")
    assert replace(shape, pattern=shape.pattern[1:]).total_params < shape.total_params
