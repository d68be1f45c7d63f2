"""Configs as published: stated, left out, nested, contradictory; always the model that is meant, or one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hpsearch.capture.config import model_of, read_config
from hpsearch.errors import CaptureError
from hpsearch.plan import Plan, model_fingerprint
from tests.cases import configs
from tests.cases.plans import graph_of, h100, search
from tests.cli.conftest import Command

JOB = ("--cluster", "h100-sxm-roce400", "--devices", 2, "--global-batch", 4, "--seq-len", 32)
TINY: configs.Config = configs.LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "num_hidden_layers": 2,
}  # fmt: skip


def count(model: nn.Module, prefix: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))


def attention_flops(config: configs.Config, seq_len: int, **changes: Any) -> int:
    model = graph_of(config, seq_len, num_hidden_layers=1, **changes)
    return sum(
        op.flops[1] for g, _ in model.pieces() for op in g.ops if op.kind == "attention" and op.phase == "forward"
    )


def test_cfg_01_stated_head_size() -> None:
    large = model_of(configs.QWEN3_235B)
    assert large.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (8192, 4096)
    assert count(large) == 235_093_634_560
    model = graph_of(configs.QWEN3_0_6B, num_hidden_layers=1)
    assert model.params["model.layers.0.self_attn.q_proj.weight"].shape == (16 * 128, 1024)
    assert model.limits["head_dim"] == 128
    stated, derived = (attention_flops(configs.QWEN3_0_6B, 64, head_dim=size) for size in (128, 64))
    assert stated == 2 * derived


def test_cfg_03_rotary_base_in_two_spellings() -> None:
    top = {k: v for k, v in configs.QWEN2_7B.items() if k != "rope_theta"} | {"num_hidden_layers": 1}
    plans = []
    for spelling in ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}):
        model = graph_of(top | spelling)
        assert model.assumed == ()
        assert model_of(top | spelling).config.rope_parameters["rope_theta"] == 1e6
        plans.append(search(model, h100(2), global_batch=2))
    assert plans[0].content == plans[1].content
    assert graph_of(top).assumed == ("rope_theta = 10000",), "a base that is not stated is reported, not silent"


def test_cfg_05_flat_and_nested_vision_language_config() -> None:
    models = [model_of(config) for config in (configs.QWEN25_VL_FLAT, configs.QWEN25_VL_NESTED)]
    shapes = [{n: tuple(p.shape) for n, p in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1]
    assert count(models[0]) == 8_292_166_656
    assert count(models[0], "model.visual.") == 676_550_144
    assert {len(m.model.language_model.layers) for m in models} == {28}
    assert {len(m.model.visual.blocks) for m in models} == {32}


def test_cfg_06_sizes_that_only_the_class_knows() -> None:
    model = model_of(configs.GEMMA3_4B)
    assert count(model) == 4_300_079_472
    from hpsearch.capture.settings import assumed

    assert assumed(configs.GEMMA3_4B, model.config)[:4] == (
        "text_config.num_attention_heads = 8",
        "text_config.num_key_value_heads = 4",
        "text_config.vocab_size = 262208",
        "text_config.head_dim = 256",
    )


def test_cfg_06_what_was_filled_in_is_said(hpsearch: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in TINY.items() if k not in ("vocab_size", "rope_theta")}))
    found = hpsearch("plan", "--model", path, *JOB, "-o", tmp_path / "plan.json")
    assert found.code == 0, found.stderr
    said = " ".join(found.stderr.split())
    assert "does not state vocab_size = 32000, rope_theta = 10000: taken from the class." in said


def test_cfg_08_hybrid_model_with_infinity(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(configs.NEMOTRON_H)
    contents = read_config(path)
    model = model_of(contents)
    assert count(model) == 56_324_350_464
    kinds = Counter(type(layer.mixer).__name__ for layer in model.model.layers)
    assert kinds == {"NemotronHMamba2Mixer": 54, "NemotronHMLP": 54, "NemotronHAttention": 10}
    with pytest.raises(CaptureError, match="num_hidden_layers = 117, but with its other fields the class has 118"):
        model_of(contents | {"num_hidden_layers": 117})
    path.write_text('{"architectures": ["LlamaForCausalLM"],\n "hidden_size": Infinite}')
    with pytest.raises(CaptureError, match=r"config.json: expected JSON, but Expecting value: line 2 column 17"):
        read_config(path)


def test_cfg_10_encoder_decoder_with_its_own_names() -> None:
    model = model_of(configs.T5_11B)
    assert count(model) == 11_307_321_344
    assert len(model.encoder.block) == len(model.decoder.block) == 24
    assert model.get_parameter("encoder.block.0.layer.0.SelfAttention.q.weight").shape == (128 * 128, 1024)
    assert "decoder.block.0.layer.1.EncDecAttention.q.weight" in dict(model.named_parameters())
    assert model.lm_head.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight


def test_cfg_11_no_feed_forward_that_is_not_there() -> None:
    model = model_of(configs.MAMBA)
    assert count(model) == pytest.approx(2.8e9, rel=0.02)
    assert not any("mlp" in name for name, _ in model.named_parameters())


def test_cfg_13_a_model_is_named_once(hpsearch: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    for option in ("--hidden-size", "--num-layers", "--vocab-size"):
        found = hpsearch("plan", "--model", path, *JOB, option, 4096)
        assert found.code == 2
        assert f"No such option: {option}" in found.stderr
    twice = hpsearch("plan", "--model", path, *JOB, "--fix", "tp=2", "--fix", "tp=1")
    assert twice.code == 2
    assert "tp is pinned twice, to 2 and to 1" in twice.stderr
    path.write_text(json.dumps(TINY | {"layer_types": ["full_attention"] * 5}))
    wrong = hpsearch("plan", "--model", path, *JOB)
    assert wrong.code == 1
    assert wrong.stderr.count("\n") == 1
    assert "`num_hidden_layers` (2) must be equal to the number of `layer_types` (5)" in wrong.stderr
    path.write_text(json.dumps(TINY))
    assert hpsearch("plan", "--model", path, *JOB, "-o", tmp_path / "plan.json").code == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.file.model.source == "config.json"
    assert plan.parameter("model.layers.0.mlp.up_proj.weight").shape == (96, 64)
    assert plan.file.model.fingerprint == model_fingerprint(graph_of(TINY, 32))
