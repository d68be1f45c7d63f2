"""Capture from a config alone: totals of public models, and what is refused, in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpsearch.capture import capture_config
from hpsearch.errors import CaptureError

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
"""https://huggingface.co/openai-community/gpt2"""
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "num_attention_heads": 128, "num_hidden_layers": 126, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
}  # fmt: skip
"""https://huggingface.co/meta-llama/Llama-3.1-405B"""
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-30B-A3B"""
T5_11B = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_ff": 65536, "d_kv": 128, "d_model": 1024,
    "num_heads": 128, "num_layers": 24, "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
"""https://huggingface.co/google-t5/t5-11b"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "seq_len", "total", "classes"),
    [
        (GPT2, 1024, 124_439_808, {"GPT2Block": 12}),
        (LLAMA_405B, 4096, 405_853_388_800, {"LlamaDecoderLayer": 126}),
        (QWEN3_30B, 4096, 30_532_122_624, {"Qwen3MoeDecoderLayer": 48}),
        (T5_11B, 512, 11_307_321_344, {"T5LayerFF": 2, "T5Block": 23, "T5Block#2": 23}),
    ],
    ids=["gpt2", "llama-405b", "qwen3-30b", "t5-11b"],
)
def test_a_public_model_is_captured_in_seconds(
    config: dict[str, Any], seq_len: int, total: int, classes: dict[str, int]
) -> None:
    start = time.process_time()
    graph = capture_config(config, seq_len=seq_len).graph
    assert graph.num_params == total
    assert {piece.name: times for piece, times in graph.pieces() if piece.name != "outer"} == classes
    assert time.process_time() - start < 30  # 15 s on a quiet machine, imports apart


def test_what_is_not_known_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text(json.dumps(GPT2)[:40])
    cases = [
        (
            GPT2 | {"architectures": ["NoSuchModelForCausalLM"]},
            16,
            "NoSuchModelForCausalLM: transformers .* has no such",
        ),
        (GPT2 | {"architectures": []}, 16, "architectures"),
        (GPT2 | {"architectures": ["GPT2Model"]}, 16, "takes no labels"),
        (GPT2 | {"architectures": 5}, 16, "config: expected `architectures` as a list of class names, but found 5"),
        (GPT2 | {"architectures": [5]}, 16, r"as a list of class names, but found \[5\]\. Write for example"),
        (GPT2 | {"architectures": {}}, 16, r"as a list of class names, but found \{\}"),
        (GPT2 | {"architectures": "GPT2LMHeadModel"}, 16, "as a list of class names, but found 'GPT2LMHeadModel'"),
        ({"architectures": ["ResNetForImageClassification"], "model_type": "resnet"}, 16, "expected image_size"),
        (GPT2, 2048, "sequence length 2048: expected at most n_positions = 1024"),
        (broken, 16, "expected JSON"),
        (tmp_path / "none.json", 16, "cannot be read"),
    ]
    for config, seq_len, problem in cases:
        with pytest.raises(CaptureError, match=problem) as caught:
            capture_config(config, seq_len=seq_len)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (GPT2, "n_layer", -1), (GPT2, "n_layer", 0), (GPT2, "n_embd", 0), (GPT2, "n_head", -12),
        (GPT2, "vocab_size", 0), (GPT2, "n_positions", 0), (LLAMA_405B, "num_hidden_layers", 0),
        (LLAMA_405B, "num_hidden_layers", -1), (LLAMA_405B, "hidden_size", -16384),
        (LLAMA_405B, "num_attention_heads", 0), (LLAMA_405B, "num_key_value_heads", 0), (T5_11B, "num_layers", 0),
        (T5_11B, "d_kv", -1), (QWEN3_30B, "num_experts", -1),
    ],
)  # fmt: skip
def test_a_size_below_one_is_refused_by_name(config: dict[str, Any], name: str, value: int) -> None:
    with pytest.raises(CaptureError) as caught:
        capture_config(config | {name: value}, seq_len=16)
    assert (
        str(caught.value)
        == f"config: expected {name} of at least {0 if name == 'num_experts' else 1}, but found {value}. Correct it."
    )


def test_a_size_below_one_in_a_nested_config_is_refused_by_name() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"num_hidden_layers": 0}}
    with pytest.raises(CaptureError, match=r"expected text_config\.num_hidden_layers of at least 1, but found 0"):
        capture_config(config, seq_len=16)
