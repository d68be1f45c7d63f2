"""Parameters counted from shapes equal the totals of the public models."""

from __future__ import annotations

from typing import Any

import pytest

from hpsearch.errors import CaptureError
from tests.estimate.stated import PUBLISHED, shape_of_config, shape_of_row

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4}
CONFIGS: list[tuple[dict[str, Any], int]] = [
    (LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
     8_030_261_248),
    (LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126},
     405_853_388_800),
    (QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_hidden_layers": 48,
              "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, 30_532_122_624),
    ({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
     124_439_808),
    ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
      "num_key_value_heads": 8, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
      "vocab_size": 32000}, 46_702_792_704),
    ({"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
      "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
      "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280}, 671_026_404_352),
    ({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 36, "num_local_experts": 128,
      "experts_per_token": 4, "attention_bias": True, "vocab_size": 201088}, 116_829_156_672),
]  # fmt: skip
"""Totals: the same configs built on the meta device by a public model library."""
MPT_7B = {
    "layers": 32, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32, "head_dim": 128, "vocab": 50368,
    "gated_mlp": False, "tied_embeddings": True, "position": "learned",
}  # fmt: skip


@pytest.mark.parametrize(("config", "total"), CONFIGS, ids=lambda x: x["model_type"] if isinstance(x, dict) else "")
def test_totals_of_public_configs(config: dict[str, Any], total: int) -> None:
    assert shape_of_config(config).total_params == total


def test_a_row_gives_the_shape() -> None:
    """6,658,859,008 parameters with a table of 2,048 positions: https://github.com/mosaicml/llm-foundry"""
    shape = shape_of_row(MPT_7B | {"name": "MPT-7b"}, seq_len=2048)
    assert shape.total_params == 6_658_859_008


def test_hybrids_have_the_size_of_their_name() -> None:
    nano, big = PUBLISHED["Nemotron 3 Nano 30B-A3B"], PUBLISHED["Nemotron 3 Super"]
    assert nano.total_params == pytest.approx(31.6e9, rel=0.01)
    assert nano.active_params == pytest.approx(3.6e9, rel=0.02)
    assert big.total_params == pytest.approx(120e9, rel=0.02)
    assert big.active_params == pytest.approx(12.7e9, rel=0.02)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CaptureError, match="model_type 'whisper'"):
        shape_of_config({"model_type": "whisper"})
    with pytest.raises(CaptureError, match="expected its shape"):
        shape_of_row({"name": "Nameless", "layers": None}, seq_len=2048)
