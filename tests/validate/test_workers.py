"""Processes that capture: an answer for every config, whatever happens to one of them."""

from __future__ import annotations

import json

import pytest

from hpsearch.graph import ModelGraph
from hpsearch.validate.workers import capture_all

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.slow
def test_graphs_refusals_and_crashes_come_back_one_by_one() -> None:
    """A rotary type that transformers does not know ends in an error of its own, deep inside."""
    unknown = LLAMA | {"architectures": ["NobodysModel"]}
    crash = LLAMA | {"rope_parameters": {"rope_type": "no such type", "rope_theta": 1e4}}
    texts = [json.dumps(config) for config in (crash, unknown, LLAMA)]
    found = dict(capture_all(texts, 64, "bf16", workers=1))
    assert isinstance(found[texts[2]], ModelGraph)
    assert "NobodysModel" in str(found[texts[1]])
    assert isinstance(found[texts[0]], str)
