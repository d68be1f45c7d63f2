"""Shapes as people state them: a published row's `model` field, or a Hugging Face config as a dict; counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpsearch.errors import CaptureError
from hpsearch.estimate.shape import LatentAttention, ModelShape, StateSpace, hybrid, transformer

_NANO = ModelShape(
    name="Nemotron 3 Nano 30B-A3B",
    hidden=2688, heads=32, kv_heads=2, head_dim=128, vocab=131072, ffn=1856, gated=False, moe_gated=False,
    pattern=hybrid("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    experts=128, top_k=6, moe_ffn=1856, shared_ffn=3712, mamba=StateSpace(64, 64, 128, 8), router_bias=True,
)  # fmt: skip
"""https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 (config.json)"""
_SUPER = ModelShape(
    name="Nemotron 3 Super",
    hidden=4096, heads=32, kv_heads=2, head_dim=128, vocab=131072, ffn=2688, gated=False, moe_gated=False,
    pattern=hybrid("MEMEMEMEM*E" * 8),
    experts=512, top_k=22, moe_ffn=2688, shared_ffn=5376, moe_latent=1024, mamba=StateSpace(128, 64, 128, 8),
    router_bias=True, mtp_layers=1,
)  # fmt: skip
"""https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 (config.json): 40 Mamba, 40 expert and 8
attention layers; here spread evenly."""
PUBLISHED = {shape.name: shape for shape in (_NANO, _SUPER)}
"""Shapes of public models that tables of results name without restating them."""


def shape_of_row(model: Mapping[str, Any], seq_len: int) -> ModelShape:
    """The shape in a row's `model` field. CaptureError when the row states none and the name is not known."""
    if model.get("layers") is None or model.get("hidden") is None or model.get("heads") is None:
        if model.get("name") in PUBLISHED:
            return PUBLISHED[str(model["name"])]
        raise CaptureError(f"model {model.get('name')}", "expected its shape, but the row states none", "Fill it in.")
    experts = int(model.get("experts") or 0)
    heads, layers = int(model["heads"]), int(model["layers"])
    sinks = "sink" in str(model.get("attention"))
    return ModelShape(
        name=str(model.get("name")),
        hidden=int(model["hidden"]),
        heads=heads,
        kv_heads=int(model.get("kv_heads") or heads),
        head_dim=int(model.get("head_dim") or model["hidden"] // heads),
        vocab=int(model.get("vocab") or 0),
        pattern=transformer(layers, int(model.get("dense_layers") or 0), experts),
        ffn=int(model.get("ffn") or 4 * model["hidden"]),
        gated=bool(model.get("gated_mlp")),
        tied=bool(model.get("tied_embeddings")),
        positions=seq_len if model.get("position") == "learned" else 0,
        experts=experts,
        top_k=int(model.get("top_k") or 0),
        moe_ffn=int(model.get("moe_ffn") or 0),
        shared_ffn=int(model.get("shared_expert_ffn") or 0),
        moe_gated=model.get("gated_mlp") is not False,
        mla=_latent(model.get("mla")),
        mtp_layers=int(model.get("mtp_layers") or 0),
        window=int(model.get("sliding_window") or 0),
        window_layers=int(model.get("swa_layers") or 0),
        bias=model.get("position") == "learned" and not model.get("gated_mlp"),
        qkv_bias=sinks,
        expert_bias=sinks,
        sinks=sinks,
        router_bias=sinks,
    )


def _latent(mla: Mapping[str, Any] | None) -> LatentAttention | None:
    if not mla:
        return None
    names = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_dim")
    return LatentAttention(*(int(mla.get(name) or 0) for name in names))


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a decoder from its Hugging Face config. CaptureError on a kind whose layers are not known here."""
    kind = str(config.get("model_type"))
    if kind == "gpt2":
        return _gpt2(config)
    if kind not in _KINDS:
        raise CaptureError(
            f"model_type {kind!r}", f"expected one of gpt2, {', '.join(sorted(_KINDS))}", "Capture the model instead."
        )
    experts = int(_first(config, "n_routed_experts", "num_local_experts", "num_experts") or 0)
    layers, heads, hidden = (config[x] for x in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    dense = len(config["mlp_only_layers"]) if config.get("mlp_only_layers") else config.get("first_k_dense_replace", 0)
    moe_ffn = int(config.get("moe_intermediate_size") or (config["intermediate_size"] if experts else 0))
    gpt_oss = kind == "gpt_oss"
    return ModelShape(
        name=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        pattern=transformer(layers, int(dense or 0), experts),
        ffn=config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        top_k=int(_first(config, "num_experts_per_tok", "experts_per_token") or 0),
        expert_groups=int(config.get("n_group") or (8 if kind == "deepseek_v3" else 1)),  # as the class fills in
        most_groups=int(config.get("topk_group") or (4 if kind == "deepseek_v3" else 1)),
        moe_ffn=moe_ffn,
        shared_ffn=moe_ffn * int(config.get("n_shared_experts") or 0),
        mla=_mla_of_config(config),
        mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
        window=int(config.get("sliding_window") or 0) if gpt_oss else 0,
        window_layers=sum(t == "sliding_attention" for t in config.get("layer_types") or ()) if gpt_oss else 0,
        qkv_bias=bool(config.get("attention_bias", kind in ("qwen2",))),
        qk_norm=kind in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        expert_bias=gpt_oss,
        sinks=gpt_oss,
        router_bias=gpt_oss,
    )


_KINDS = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss",
}  # fmt: skip


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _mla_of_config(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(*(int(config.get(name) or 0) for name in names))


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads = config["n_embd"], config["n_head"]
    return ModelShape(
        name="gpt2",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config["vocab_size"],
        pattern=transformer(config["n_layer"], 0, 0),
        ffn=config.get("n_inner") or 4 * hidden,
        gated=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["n_positions"],
        bias=True,
    )
